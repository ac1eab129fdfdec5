"""Hostile inputs for every parser that reads what others wrote: mutations of valid files, and what must hold for each.

pytest runs some thousands with a fixed seed (tests/test_hostile_files.py). A longer run, guided by coverage,
over the same targets (`pip install atheris` first; nothing else needs it):

    python -m tests.fuzz_parsers config --guided --inputs 1000000
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llminfer.errors import LlminferError

MOST_BYTES = 512 * 1024**2
MOST_ERROR_CHARACTERS = 1 << 15
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser: the file's name, valid contents, and the function that reads the file of a folder."""

    file: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda folder: None


class TookTooLong(BaseException):
    """More processor time than any input may take. No library's `except Exception` stops it."""


# What is read


def read_config(folder: Path) -> None:
    """A config as `kv-size` reads it: every runtime's size, one of them rendered."""
    from llminfer.kv.config import load_config
    from llminfer.kv.rules.families import read_model

    _sizes(read_model(load_config(folder), source="config"))


def read_gguf(folder: Path) -> None:
    """A GGUF header, its weights with those of its other parts, and its sizes."""
    from llminfer.kv.gguf_layers import read_gguf_model
    from llminfer.kv.weights import weights_bytes

    for read in (partial(weights_bytes, name="m"), lambda file: _sizes(read_gguf_model(file))):
        try:
            read(folder / "model-00001-of-00002.gguf")
        except LlminferError as error:
            _check_error(error)


def _sizes(model: Any) -> None:
    from llminfer.kv.footprint import footprint
    from llminfer.kv.results import Answer
    from llminfer.kv.runtimes.table import RUNTIMES
    from llminfer.render import kv_json

    answers = []
    for runtime in RUNTIMES:
        try:
            found = footprint(model, tokens=1000, batch=2, runtime=runtime)
        except LlminferError as error:
            _check_error(error)
            continue
        answers.append(Answer(model=model, setup=found.setup, tokens=1000, footprint=found))
    kv_json.render(answers[:1], layers=True)


def read_weights(folder: Path) -> None:
    """Weights as `kv-size` counts them and as `generate` checks them."""
    from llminfer.engine.checkpoints.checkpoint import _check_weights
    from llminfer.kv.weights import weights_bytes

    for read in (partial(weights_bytes, name="m", config={}), partial(_check_weights, config={}, allow_pickle=True)):
        try:
            read(folder)
        except LlminferError as error:
            _check_error(error)


def read_prompts(folder: Path) -> None:
    """The lines of a batch."""
    from llminfer.jobs import BadLine, read_jobs
    from llminfer.request import GenerationRequest

    for job in read_jobs(folder / "prompts.jsonl", GenerationRequest()):
        if isinstance(job, BadLine):
            _check_error(job.error)


def read_chat(folder: Path) -> None:
    """A conversation that was saved."""
    from llminfer.transcript import read_transcript

    read_transcript(folder / "chat.json")


def read_adapter(folder: Path) -> None:
    """A folder that holds an adapter."""
    from llminfer.kv.config import load_config

    load_config(folder)


def load_folder(folder: Path) -> None:
    """A checkpoint as `generate` loads it, up to the first forward."""
    from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
    from llminfer.engine.load import load
    from llminfer.engine.sampling.resolve import effective_sampling
    from llminfer.engine.text.prompt import encode_prompt
    from llminfer.params import SamplingOverrides

    loaded = load(inspect_checkpoint(folder), device="cpu")
    effective_sampling(SamplingOverrides(), loaded.generation_defaults)
    encode_prompt(loaded.tokenizer, "a b", system="c" if loaded.tokenizer.chat_template else None)


def convert_gguf(folder: Path) -> None:
    """A GGUF file as `generate` converts it."""
    from llminfer.engine.checkpoints.gguf import _convert, _require_convertible
    from llminfer.kv.gguf import read_gguf_header

    header = read_gguf_header(folder / "model.gguf")
    _require_convertible(header)
    with tempfile.TemporaryDirectory(dir=folder) as into:
        _convert(header, Path(into), {}, None)


def read_prompt_cache(folder: Path) -> None:
    """A prompt cache of the tiny model."""
    from llminfer.engine.prompt_cache import load_prompt_cache
    from llminfer.params import CacheOptions

    load_prompt_cache(
        folder / "cache", _tiny_model(folder), CacheOptions(), max_tokens=None, prompt_ids=[0, 5, 6, 7, 8, 9]
    )


_LOADED: dict[Path, Any] = {}


def _tiny_model(folder: Path) -> Any:
    if folder not in _LOADED:
        from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
        from llminfer.engine.load import load

        _LOADED[folder] = load(inspect_checkpoint(folder / "model"), device="cpu")
    return _LOADED[folder]


# What valid files look like


def config_seeds() -> list[bytes]:
    """The configs that ship, and the class defaults of every type in the table."""
    from llminfer.kv.defaults import type_defaults
    from llminfer.kv.rules.families import FAMILIES

    shipped = [file.read_bytes() for file in sorted(CONFIGS.glob("*.json"))]
    types = [{**dict(type_defaults(name).values), "model_type": name, "dtype": "bfloat16"} for name in FAMILIES]
    return [*shipped, *(json.dumps(config).encode() for config in types)]


def gguf_seeds() -> list[bytes]:
    """A header for every architecture, with all keys that any rule reads."""
    from llminfer.kv.gguf_layers import ARCHITECTURES

    return [pack_gguf(name, GGUF_KEYS) for name in ARCHITECTURES]


GGUF_KEYS: dict[str, int | list[int]] = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": [2, 0, 2, 2],
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_mla": 16,
    "attention.key_length_swa": 8,
    "attention.sliding_window": 512,
    "attention.sliding_window_pattern": [1, 1, 0, 1],
    "attention.shared_kv_layers": 1,
    "full_attention_interval": 2,
    "nextn_predict_layers": 0,
    "ssm.inner_size": 64,
    "ssm.state_size": 8,
    "ssm.group_count": 1,
    "ssm.conv_kernel": 4,
    "shortconv.l_cache": 3,
}


def pack_gguf(architecture: str, keys: dict[str, int | list[int]]) -> bytes:
    """A GGUF file with such metadata and one small tensor."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    rows = [text("general.architecture") + struct.pack("<I", 8) + text(architecture)]
    for name, value in keys.items():
        packed = (
            struct.pack("<II", 4, value)
            if isinstance(value, int)
            else struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
        )
        rows.append(text(f"{architecture}.{name}") + packed)
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(rows)) + b"".join(rows) + tensor
    return head + bytes(-len(head) % 32) + bytes(32)


def safetensors_seeds() -> list[bytes]:
    """Files of one and of three tensors."""
    seeds = []
    for count in (1, 3):
        rows = {f"t{n}": {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]} for n in range(count)}
        header = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
        seeds.append(struct.pack("<Q", len(header)) + header + bytes(8 * count))
    return seeds


def write_shards(folder: Path) -> None:
    """The other files of a folder with an index."""
    for number, seed in enumerate(safetensors_seeds(), start=1):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(seed)
    write_plain(folder)


def write_plain(folder: Path) -> None:
    """A config and a tokenizer file."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    (folder / "tokenizer.json").write_text("{}")


def index_seeds() -> list[bytes]:
    """An index of two shards."""
    homes = {"t0": "model-00001-of-00002.safetensors", "t2": "model-00002-of-00002.safetensors"}
    return [json.dumps({"metadata": {"total_size": 32}, "weight_map": homes}).encode()]


def prompt_seeds() -> list[bytes]:
    """Lines with every field."""
    message = {"role": "user", "content": "a"}
    line = {"id": "x", "system": "s", "max_new_tokens": 3, "stop": ["a"], "temperature": 0.5, "top_k": 3, "seed": 1}
    sampling = {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "logit_bias": {"3": 1.0}, "min_new_tokens": 1}
    lines = ({**line, "prompt": "a"}, {**sampling, "messages": [message]}, {"prompt": "b"})
    return [json.dumps(one).encode() + b"\n" for one in lines]


def chat_seeds() -> list[bytes]:
    """A conversation."""
    messages = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    return [json.dumps({"schema_version": 1, "model": "m", "messages": messages}).encode()]


def adapter_seeds() -> list[bytes]:
    """A LoRA's config."""
    return [json.dumps({"peft_type": "LORA", "base_model_name_or_path": "example/base", "r": 8}).encode()]


def write_tiny(folder: Path) -> None:
    """A checkpoint of a two-layer Llama."""
    from tests.tiny_checkpoints import save_tiny_checkpoint

    save_tiny_checkpoint(folder)


def tiny_seeds(name: str) -> list[bytes]:
    """One file of that checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))
        return [(Path(folder) / name).read_bytes()]


def generation_seeds() -> list[bytes]:
    """A generation config with every field that is read."""
    fields = {"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 5, "top_p": 0.9, "do_sample": True}
    more = {"repetition_penalty": 1.1, "bad_words_ids": [[3]], "min_new_tokens": 1, "stop_strings": ["x"], "min_p": 0.1}
    return [json.dumps({**fields, **more, "max_new_tokens": 4, "suppress_tokens": [4]}).encode()]


def tiny_gguf_seeds() -> list[bytes]:
    """A whole GGUF file with a tokenizer."""
    from tests.tiny_gguf import write_tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        return [write_tiny_llama(Path(folder) / "tiny.gguf").read_bytes()]


def write_tiny_with_cache(folder: Path) -> None:
    """The tiny checkpoint in a folder of its own."""
    (folder / "model").mkdir()
    write_tiny(folder / "model")


def cache_seeds() -> list[bytes]:
    """A prompt cache of eight tokens."""
    import torch

    from llminfer.engine.forward.forward import make_forward
    from llminfer.engine.prompt_cache import save_prompt_cache
    from llminfer.params import CacheOptions

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tiny_with_cache(folder)
        loaded, options = _tiny_model(folder), CacheOptions()
        forward = make_forward(loaded.model, options=options)
        with torch.inference_mode():
            forward([0, 5, 6, 7, 8, 9, 10, 11])
        save_prompt_cache(folder / "cache", loaded, forward, options)
        return [(folder / "cache").read_bytes()]


# those without torch: a millisecond an input
LIGHT = {
    "config": Target(file="config.json", seeds=config_seeds, read=read_config),
    "gguf": Target(file="model-00001-of-00002.gguf", seeds=gguf_seeds, read=read_gguf),
    "weights": Target(file="model.safetensors", seeds=safetensors_seeds, read=read_weights, prepare=write_plain),
    "index": Target(file="model.safetensors.index.json", seeds=index_seeds, read=read_weights, prepare=write_shards),
    "prompts": Target(file="prompts.jsonl", seeds=prompt_seeds, read=read_prompts),
    "chat": Target(file="chat.json", seeds=chat_seeds, read=read_chat),
    "adapter": Target(file="adapter_config.json", seeds=adapter_seeds, read=read_adapter),
}
_TINY = partial(Target, read=load_folder, prepare=write_tiny)
HEAVY = {
    "load-config": _TINY(file="config.json", seeds=partial(tiny_seeds, "config.json")),
    "load-tokenizer": _TINY(file="tokenizer.json", seeds=partial(tiny_seeds, "tokenizer.json")),
    "load-tokenizer-config": _TINY(file="tokenizer_config.json", seeds=partial(tiny_seeds, "tokenizer_config.json")),
    "load-generation-config": _TINY(file="generation_config.json", seeds=generation_seeds),
    "load-template": _TINY(file="chat_template.jinja", seeds=partial(tiny_seeds, "chat_template.jinja")),
    "load-weights": _TINY(file="model.safetensors", seeds=partial(tiny_seeds, "model.safetensors")),
    "convert-gguf": Target(file="model.gguf", seeds=tiny_gguf_seeds, read=convert_gguf),
    "prompt-cache": Target(file="cache", seeds=cache_seeds, read=read_prompt_cache, prepare=write_tiny_with_cache),
}
TARGETS = {**LIGHT, **HEAVY}


# Mutations

NUMBERS = (0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**7, 10**20)
VALUES: tuple[Any, ...] = (
    *(None, True, False, *NUMBERS, 10**309, 0.0, 0.5, -2.5, 1e308, float("nan"), float("inf"), "", "0", "auto"),
    *("\ud800", "\x00", "\x1b[2J", "a/../b", "x" * 5000, [], {}, [0], [None], [[]], [{}], {"a": 1}, {"": []}),
    *([0] * 300, ["full_attention"], ["full_attention", "sliding_attention"], [2**31] * 4, "../x"),
)
# what no JSON writer writes; a marker in a text is replaced by it
RAW = ("9" * 5001, "[" * 100_000, '{"a":' * 2000, "1e999", "-", '{"a":1,"a":2}', '"\\ud800"', "[" * 80 + "]" * 80)


def mutate(data: bytes, seed: int) -> bytes:
    """A mutation of a file, always the same for the same seed."""
    source = random.Random(seed)
    if data[8:9] == b"{" and source.random() < 0.7:  # safetensors: the JSON within, with its length or another
        header = _mutate_json(data[8 : data.rfind(b"}") + 1], source)
        length = len(header) if source.random() < 0.9 else source.choice(NUMBERS)
        return struct.pack("<Q", length & (2**64 - 1)) + header + data[data.rfind(b"}") + 1 :]
    if data[:1] in (b"{", b"[") and source.random() < 0.8:
        return _mutate_json(data, source)
    return _mutate_bytes(data, source)


def _mutate_json(data: bytes, source: random.Random) -> bytes:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _mutate_bytes(data, source)
    raw = ""
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        places = list(_places(document))
        if not places:
            break
        container, key = source.choice(places)
        action = source.randrange(8)
        if action == 0:
            del container[key]
        elif action == 1:
            other, name = source.choice(places)
            container[key] = copy.deepcopy(other[name])
        elif action == 2:
            raw = source.choice(RAW)
            container[key] = "@raw@"
        elif action == 3 and isinstance(container[key], list):
            container[key] = container[key] * source.choice((0, 2, 3, 1000)) + [copy.deepcopy(source.choice(VALUES))]
        elif action == 4 and isinstance(container[key], int | float):
            container[key] = source.choice((container[key] * -1, container[key] + 1, container[key] * 2, float("nan")))
        else:
            container[key] = copy.deepcopy(source.choice(VALUES))
    text = json.dumps(document, ensure_ascii=source.random() < 0.7)
    return text.replace('"@raw@"', raw, 1).encode("utf-8", "surrogatepass")


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [document]
    while waiting:
        container = waiting.pop()
        for key in list(container) if isinstance(container, dict) else range(min(len(container), 20)):
            yield container, key
            if isinstance(container[key], dict | list):
                waiting.append(container[key])


def _mutate_bytes(data: bytes, source: random.Random) -> bytes:
    content = bytearray(data)
    # the names in a binary file: what follows one is a type, a length or a value
    ends = [match.end() for match in re.finditer(rb"[a-z][a-z0-9_.]{3,}", data[: 1 << 16])]
    for _ in range(source.choice((1, 1, 2, 4, 8))):
        near = source.choice(ends) + source.choice((0, 4, 8, 12, 16)) if ends else 0
        at = near if source.random() < 0.6 else source.randrange(min(len(content), 1 << 16) + 1)
        action = source.randrange(7)
        if action == 0:
            del content[at:]
        elif action == 1:
            del content[at : at + source.randrange(1, 64)]
        elif action == 2:
            content[at:at] = content[at : at + source.randrange(1, 64)]
        elif action == 3 and at < len(content):
            content[at] ^= 1 << source.randrange(8)
        elif action == 4:
            content[at : at + 4] = struct.pack("<I", source.choice((*NUMBERS, *range(14))) & (2**32 - 1))
        elif action == 5:
            content[at : at + 8] = struct.pack("<Q", source.choice(NUMBERS) & (2**64 - 1))
        else:
            content[at : at + source.randrange(8)] = source.randbytes(source.randrange(8))
    return bytes(content)


# What must hold


def findings(name: str, *, inputs: int, seed: int, cpu_s: float) -> Iterator[dict[str, Any]]:
    """Run so many mutations against a target; yields what broke, each kind of fault once."""
    target, kinds = TARGETS[name], set()
    seeds = target.seeds()
    with tempfile.TemporaryDirectory(dir=_memory_disk()) as place:
        folder = Path(place)
        target.prepare(folder)
        for data in seeds[:3]:  # what a process does once (imports, tables) is no input's cost
            attempt(target, folder, data, cpu_s=60)
        limit_memory()
        for number in range(inputs):
            data = mutate(seeds[number % len(seeds)], seed + number)
            found = attempt(target, folder, data, cpu_s=cpu_s)
            if found is not None and found["where"] not in kinds:
                kinds.add(found["where"])
                yield {"target": name, "input": seed + number, **found}


def attempt(target: Target, folder: Path, data: bytes, *, cpu_s: float) -> dict[str, str] | None:
    """Have one input read; None when it was answered or refused, else what happened and where."""
    (folder / target.file).write_bytes(data)
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        target.read(folder)
    except LlminferError as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            _check_error(error)
        except AssertionError as failed:
            return _finding(failed, data)
    except BaseException as error:  # a panic of Rust is no Exception
        signal.setitimer(signal.ITIMER_PROF, 0)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return _finding(error, data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _check_error(error: LlminferError) -> None:
    assert error.exit_code in (1, 2, 3, 4, 5)
    assert error.message
    assert len(error.message) + len(error.hint or "") <= MOST_ERROR_CHARACTERS, "an error of many pages"


def _finding(error: BaseException, data: bytes) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "llminfer" in frame.filename and "fuzz_parsers" not in frame.filename]
    last = (ours or frames)[-1]
    return {
        "error": f"{type(error).__name__}: {str(error)[:200]}",
        "where": f"{type(error).__name__} {Path(last.filename).name}:{last.lineno}",
        "data": base64.b64encode(data[:20_000]).decode(),
    }


def _stop(number: int, frame: Any) -> None:
    raise TookTooLong


def limit_memory() -> None:
    """Let the process grow by 512 MiB from here on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, resource.RLIM_INFINITY))


def _memory_disk() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def run_guided(name: str, *, inputs: int, seed: int, cpu_s: float, report: Path) -> None:
    """Run so many inputs against a target, each mutated from one that reached new code. Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["llminfer"]):
        import llminfer.engine.checkpoints.checkpoint
        import llminfer.jobs
        import llminfer.kv.gguf_layers
        import llminfer.kv.rules.families
        import llminfer.render.kv_json  # noqa: F401
    target, kinds = TARGETS[name], set()
    place = Path(tempfile.mkdtemp(dir=_memory_disk()))
    target.prepare(place)
    corpus = Path(tempfile.mkdtemp())
    for number, data in enumerate(target.seeds()):
        (corpus / f"{number}").write_bytes(data)

    def one(data: bytes) -> None:
        found = attempt(target, place, data, cpu_s=cpu_s)
        if found is not None and found["where"] not in kinds:
            kinds.add(found["where"])
            with report.open("a") as file:
                file.write(json.dumps({"target": name, **found}) + "\n")

    def mutated(data: bytes, most: int, number: int) -> bytes:
        if number % 4 == 0:
            return bytes(atheris.Mutate(data, most))
        return mutate(data, number)[:most]

    limit_memory()
    most = 4096  # what is long in a seed is repetition; short inputs run many times faster
    options = [f"-runs={inputs}", f"-seed={seed}", f"-max_len={most}", "-rss_limit_mb=4096", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=mutated)
    atheris.Fuzz()


def main() -> None:
    """Fuzz the named targets, all light ones when none is named; one JSON object a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=list(LIGHT))
    parser.add_argument("--inputs", type=int, default=1000, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu-s", type=float, default=1.0, help="processor time that an input may take")
    parser.add_argument("--guided", action="store_true", help="guide by coverage (atheris); one target")
    parser.add_argument("--report", type=Path, default=Path("findings.jsonl"), help="of a guided run")
    asked = parser.parse_args()
    if asked.guided:
        run_guided(asked.targets[0], inputs=asked.inputs, seed=asked.seed, cpu_s=asked.cpu_s, report=asked.report)
    for name in asked.targets:
        for found in findings(name, inputs=asked.inputs, seed=asked.seed, cpu_s=asked.cpu_s):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
