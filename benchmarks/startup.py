"""Process start to first token, ours against the barest script, interleaved; and light commands against python.

    python benchmarks/startup.py [--rounds N]

The barest script imports torch and the two Auto classes of transformers, loads the same converted
checkpoint and its tokenizer, runs one forward over the same prompt and prints the most likely token.
Each figure is a whole process's: its wall time, a median over the rounds with its spread, and the
processor's time, which others on the machine disturb less. Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import os
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


def used_s(command: list[str]) -> tuple[float, float]:
    """Seconds of wall time and of the processor that a process takes from its start to its end."""
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):  # 2: the usage error
        sys.exit(f"{command} ended with {process.returncode}")
    return wall_s, usage.ru_utime + usage.ru_stime


def interleaved(commands: dict[str, list[str]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor times by name; every round runs all commands, and a first round is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            used = used_s(command)
            if number:
                times[name].append(used)
    return times


def report(times: dict[str, list[tuple[float, float]]], base: str) -> None:
    """A line per command: median and spread of the wall time, the processor's time, and their ratios to the base."""
    for name, values in times.items():
        pairs = list(zip(values, times[base], strict=True))
        wall_ratio, processor_ratio = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
        walls, processor_s = [wall for wall, _ in values], statistics.median(used for _, used in values)
        spread = f"({min(walls):.3f} to {max(walls):.3f})"
        wall = f"{statistics.median(walls):7.3f} s  {spread:<19} {wall_ratio:5.2f} ×"
        print(f"{name:<26} wall {wall}  processor {processor_s:6.3f} s {processor_ratio:5.2f} × {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    rounds = parser.parse_args().rounds
    from llminfer.engine.checkpoints.builtin import DEFAULT_GENERATION, find_default_model
    from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf

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
