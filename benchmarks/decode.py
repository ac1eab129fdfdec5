"""Tokens/s of decode and prefill: our settings, `model.generate()` and other programs, in one interleaved session.

    python benchmarks/decode.py [--contenders a,b,c] [--rounds N] [--json]

Every contender is loaded once, in a process of its own, and stays resident. A round measures the
memory's bandwidth and then runs each contender once, in an order that rotates from round to round; the
first round is not counted. Ratios to `generate-float32` are taken round by round. Programs that are not
installed are skipped with a word; `make bench-peers` brings them into an environment of their own.
docs/performance.md says what each figure means.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, this finds its own modules

from benchmarks.decoding.contenders import Contender, choose  # noqa: E402
from benchmarks.decoding.report import Setting, document_of, format_document  # noqa: E402
from benchmarks.decoding.session import (  # noqa: E402
    Worker,
    WorkerFailed,
    ask,
    free_memory_bytes,
    make_probe,
    run_rounds,
    start,
    stop,
    worker_command,
)
from llminfer import __version__  # noqa: E402
from llminfer.engine.checkpoints.builtin import DEFAULT_GENERATION, DEFAULT_MODEL_NAME, require_default_model  # noqa: E402
from llminfer.engine.checkpoints.conversions import cached_checkpoint  # noqa: E402
from llminfer.engine.machine.disk_cache import cache_folder  # noqa: E402
from llminfer.errors import LlminferError, ModelNotAvailable, UsageError  # noqa: E402
from llminfer.kv.footprint import footprint  # noqa: E402
from llminfer.kv.gguf import read_gguf_header  # noqa: E402
from llminfer.kv.rules.families import read_model  # noqa: E402
from llminfer.kv.weights import weights_bytes  # noqa: E402

TEXT = (
    "The lighthouse keeper wrote down the weather every morning. On the first day the wind came from the north, and "
    "the boats stayed in the harbour. On the second day there was fog, so thick that the keeper could not see the end "
    "of the pier. On the third day a ship with three masts came in from the open sea. Its captain had maps of islands "
    "that nobody had heard of, a box of seeds, and a clock that ran backwards. The children asked him how far he had "
    "travelled. He counted on his fingers, laughed, and said that he would tell them the story from the beginning. "
)
# what a process with torch and transformers takes beside the weights
LIBRARIES_BYTES = 500 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What all contenders run: the checkpoint, the GGUF file that it was converted from, and how we name it."""

    name: str
    argument: str | None
    folder: Path
    gguf: Path | None


def main() -> int:
    """Run the session; 0 when at least one contender was measured."""
    arguments = parse_arguments()
    try:
        contenders = choose(arguments.contenders)
        model = find_model(arguments.model)
        prompt, prompt_ids = prompt_of(model.folder, arguments.prompt_tokens)
        kv_elements = elements_cached(model.folder, arguments.prompt_tokens + arguments.new_tokens // 2)
    except LlminferError as error:
        say(f"error: {error.message}")
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    try:
        document = measure(contenders, model, prompt, prompt_ids, kv_elements, arguments)
    except KeyboardInterrupt:
        return 130
    print(json.dumps(document, indent=2, allow_nan=False) if arguments.json else format_document(document))
    return 0 if document["contenders"] else 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--contenders", help="comma-separated names; all when not given")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="counted rounds (default 5)")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=128, help="tokens of the prompt (default 128)")
    parser.add_argument("--new-tokens", type=at_least(2), default=128, help="tokens to generate (default 128)")
    parser.add_argument("--model", help="a folder or a .gguf file; the built-in model when not given")
    parser.add_argument("--threads", type=at_least(1), default=usable_cores(), help="threads for everyone (all cores)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="environment of the other programs")
    parser.add_argument("--timeout", type=at_least(1), default=900, help="seconds for a load or a run (default 900)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    return parser.parse_args(argv)


def at_least(lowest: int) -> Any:
    """A type for argparse: whole numbers from `lowest` on."""

    def parse(text: str) -> int:
        number = int(text)
        if number < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}")
        return number

    parse.__name__ = "number"  # argparse names it in its message
    return parse


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(text: str) -> None:
    """Talk goes to standard error."""
    print(text, file=sys.stderr, flush=True)


# what is run


def find_model(argument: str | None) -> Model:
    """The model's files, converted from a GGUF file now if they were not before.

    Raises:
        ModelNotAvailable: when they are not there.
    """
    path = require_default_model() if argument is None else Path(argument)
    if path.suffix == ".gguf":
        defaults = DEFAULT_GENERATION if argument is None else None
        name = DEFAULT_MODEL_NAME if argument is None else path.stem
        folder = cached_checkpoint(path, generation_defaults=defaults) or _convert(path, defaults)
        return Model(name=name, argument=argument, folder=folder, gguf=path)
    if not all((path / name).is_file() for name in ("config.json", "tokenizer.json")):
        raise ModelNotAvailable(f"{path} is no folder with a config.json and a tokenizer.json")
    return Model(name=path.resolve().name, argument=str(path), folder=path, gguf=None)


def _convert(path: Path, defaults: Mapping[str, object] | None) -> Path:
    from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf

    return checkpoint_for_gguf(path, generation_defaults=defaults)


def prompt_of(folder: Path, tokens: int) -> tuple[str, list[int]]:
    """A text of exactly so many tokens, and their ids.

    Raises:
        UsageError: when no beginning of the text has so many.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = TEXT * (1 + tokens // 8)  # no vocabulary takes fewer than 8 tokens for it

    def ids_of(end: int) -> list[int]:
        return list(tokenizer.encode(text[:end]).ids)

    # longer beginnings have more tokens, give or take the last word
    near = bisect_left(range(len(text)), tokens, key=lambda end: len(ids_of(end)))
    for end in sorted(range(max(1, near - 40), min(len(text), near + 40)), key=lambda end: abs(end - near)):
        if len(ids_of(end)) == tokens:
            return text[:end], ids_of(end)
    raise UsageError(f"--prompt-tokens {tokens}: no text of so many tokens was found")


def elements_cached(folder: Path, tokens: int) -> int:
    """Elements of all keys and values, states included, with so many tokens cached."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = read_model(config, source=str(folder))
    return footprint(model, tokens=tokens, dtype="float32", runtime="ideal").total_bytes // 4


# the session


def measure(
    contenders: Sequence[Contender],
    model: Model,
    prompt: str,
    prompt_ids: Sequence[int],
    kv_elements: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Load everyone, run the rounds, end everyone; the document."""
    workers: list[Worker] = []
    skipped: dict[str, str] = {}
    try:
        for contender in contenders:
            say(f"loading {contender.name}")
            try:
                workers.append(load(contender, model, prompt, arguments))
            except WorkerFailed as failure:
                skipped[contender.name] = str(failure)
                say(f"skipped {contender.name}: {failure}")
        session = run_rounds(
            workers,
            rounds=arguments.rounds,
            prompt_ids=prompt_ids,
            new_tokens=arguments.new_tokens,
            timeout_s=arguments.timeout,
            probe=make_probe(arguments.threads),
            say=say,
        )
    finally:
        for worker in workers:
            stop(worker)
    session.skipped |= skipped
    setting = Setting(
        model=model.name,
        prompt_tokens=len(prompt_ids),
        new_tokens=arguments.new_tokens,
        rounds=arguments.rounds,
        threads=arguments.threads,
        kv_elements=kv_elements,
        machine=machine(),
        date=datetime.date.today().isoformat(),
    )
    facts = {worker.name: worker.facts for worker in workers}
    idle = {worker.name: worker.idle_cpu_s / worker.idle_s for worker in workers if worker.idle_s}
    return document_of(setting, contenders, session, facts, idle)


def load(contender: Contender, model: Model, prompt: str, arguments: argparse.Namespace) -> Worker:
    """A worker that has loaded its contender.

    Raises:
        WorkerFailed: when it cannot, with the reason.
    """
    python = arguments.peers / "bin" / "python" if contender.is_peer else None
    if python is not None and not python.is_file():
        raise WorkerFailed(f"there is no {arguments.peers.name}: make bench-peers")
    _require_memory(model)
    told = {
        "name": contender.name,
        "kind": contender.kind,
        **contender.options,
        "model": model.argument,
        "folder": str(model.folder),
        "prompt": prompt,
        "threads": arguments.threads,
        "context": arguments.prompt_tokens + arguments.new_tokens,
    }
    if contender.made is not None and python is not None:
        told["path"] = str(peer_file(contender.made, model, python, arguments.timeout))
        if contender.made[0] == "gguf":
            told["weight_bytes"] = gguf_bytes(Path(told["path"]))
    worker = start(contender.name, worker_command(python), worker_environment(arguments.threads))
    try:
        worker.facts = ask(worker, {"do": "load", "contender": told}, timeout_s=arguments.timeout)
    except BaseException:
        stop(worker)
        raise
    return worker


def _require_memory(model: Model) -> None:
    """Refuse to load one contender more than fits: swapping, or being killed, would spoil the session."""
    free, needed = free_memory_bytes(), LIBRARIES_BYTES + 2 * weights_bytes(model.folder, name=model.name)
    if free is not None and free < needed:
        raise WorkerFailed(f"{free / 1024**3:.1f} GiB of memory are left, and it may need {needed / 1024**3:.1f}")


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of every worker: so many threads, no network, no talk."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }


def peer_file(made: tuple[str, str], model: Model, python: Path, timeout_s: float) -> Path:
    """The file that a peer needs of this model, made now if it was not before.

    Raises:
        WorkerFailed: when there is nothing to make it from, or its maker fails.
    """
    maker, file_format = made
    if maker == "gguf" and model.gguf is None:
        raise WorkerFailed("it needs a GGUF file: --model FILE.gguf")
    if file_format == "as-is":
        assert model.gguf is not None
        return model.gguf
    path = peers_folder(model) / (f"{file_format}.gguf" if maker == "gguf" else f"{maker}-{file_format}")
    if path.exists():
        return path
    say(f"making {path.name}, once")
    command = [str(python), "-P", str(ROOT / "benchmarks" / "decoding" / "peer_models.py"), maker, file_format]
    command += ["--checkpoint", str(model.folder), "--out", str(path)]
    command += ["--gguf", str(model.gguf)] if model.gguf is not None else []
    environment = worker_environment(usable_cores())
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired as late:
        raise WorkerFailed(f"making {path.name} took longer than {timeout_s:g} s") from late
    except subprocess.CalledProcessError as failure:
        lines = failure.stderr.decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {failure.returncode}")
        raise WorkerFailed(f"making {path.name} failed: {last}") from failure
    return path


def gguf_bytes(path: Path) -> int:
    """Bytes of the tensors that a step reads in full: not an embedding table beside a head of its own."""
    held = {tensor.name: tensor.nbytes for tensor in read_gguf_header(path).tensors}
    if "output.weight" in held:
        held.pop("token_embd.weight", None)
    return sum(held.values())


def peers_folder(model: Model) -> Path:
    """Where the peers' files of this model are kept: a folder for each state of its files."""
    files = [model.gguf] if model.gguf is not None else sorted(model.folder.glob("*.safetensors"))
    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return cache_folder() / "peers" / hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "platform": platform.platform(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "llminfer": __version__,
    }


if __name__ == "__main__":
    sys.exit(main())
