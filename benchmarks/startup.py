"""Process start to first token, ours against the barest script, interleaved; and light commands against python.

    python benchmarks/startup.py [--rounds N]

The barest script imports torch and the two Auto classes of transformers, loads the same converted
checkpoint and its tokenizer, runs one forward over the same prompt and prints the most likely token.
Each figure is the wall time of a whole process, a median over the rounds with its spread; the ratio
is taken round by round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PROMPT = "What is the capital of France?"

BAREST = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
messages = [{"role": "user", "content": prompt}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
with torch.inference_mode():
    logits = model(ids, logits_to_keep=1).logits
print(tokenizer.decode([int(logits[0, -1].argmax())]))
"""


def wall_s(command: list[str]) -> float:
    """Seconds that a process takes from its start to its end."""
    start_s = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def interleaved(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Wall times by name; every round runs all commands, and a first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            duration_s = wall_s(command)
            if number:
                times[name].append(duration_s)
    return times


def report(times: dict[str, list[float]], base: str) -> None:
    """A line per command: median, spread, and the median ratio to the base."""
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times[base], strict=True))
        spread = f"({min(values):.3f} to {max(values):.3f})"
        print(f"{name:<28} {statistics.median(values):7.3f} s  {spread}  {ratio:5.2f} × {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    rounds = parser.parse_args().rounds
    from llminfer.engine.default_model import DEFAULT_GENERATION, find_default_model
    from llminfer.engine.gguf import checkpoint_for_gguf

    path = find_default_model()
    if path is None:
        sys.exit("the built-in model is not installed")
    folder = checkpoint_for_gguf(path, generation_defaults=DEFAULT_GENERATION)
    llminfer = [sys.executable, "-m", "llminfer"]
    first_token = {
        "barest script": [sys.executable, "-c", BAREST, str(folder), PROMPT],
        "llminfer generate -n 1": [*llminfer, "generate", PROMPT, "-n", "1"],
    }
    report(interleaved(first_token, rounds), "barest script")
    light = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "llminfer --help": [*llminfer, "--help"],
        "llminfer kv-size --bytes": [*llminfer, "kv-size", "llama-3.1-8b", "-N", "8192", "--bytes"],
        "llminfer kv-size, a table": [*llminfer, "kv-size", "llama-3.1-8b", "-N", "8192"],
        "llminfer, a usage error": [
            sys.executable,
            "-c",
            "from llminfer.cli.app import run; run(['generate', '--seed', '-1', 'x'])",
        ],
    }
    report(interleaved(light, rounds), "python -c pass")


if __name__ == "__main__":
    main()
