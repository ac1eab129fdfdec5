"""Caches in files: a later run feeds the new ids alone and gets the same tokens, or is told what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llminfer.api import generate
from llminfer.engine import prompt_cache
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.load import load
from llminfer.engine.model import LoadedModel
from llminfer.engine.prompt_cache import load_prompt_cache
from llminfer.errors import GenerationFailed, LlminferError, PromptCacheMismatch
from llminfer.events import Finished, Started, Step
from llminfer.params import CacheOptions, Execution, StopCriteria
from tests.engine.test_prefill import watched
from tests.tiny_checkpoints import byte_level_tokenizer, save_tiny_checkpoint
from tests.tiny_models import tiny_config

LONG = "A prompt that is longer than the windows of these models are, by far."
TYPES = ("llama", "gpt2", "mistral", "gemma3_text", "lfm2_moe", "qwen3_next", "mamba2", "falcon_h1", "deepseek_v3")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny models by type, saved and loaded once."""
    made: dict[str, LoadedModel] = {}

    def get(model_type: str) -> LoadedModel:
        if model_type not in made:
            tokenizer = byte_level_tokenizer()
            config = tiny_config(model_type, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1)
            folder = save_tiny_checkpoint(tmp_path_factory.mktemp(model_type), config, tokenizer=tokenizer)
            made[model_type] = load(inspect_checkpoint(folder), name=model_type, device="cpu", dtype="float32")
        return made[model_type]

    return get


def run(
    model: LoadedModel, text: str, file: Path | None = None, count: int = 6, **options: Any
) -> tuple[Started, list[Step], Finished]:
    started, *steps, finished = generate(
        model,
        text,
        raw=True,
        sampling={"temperature": 0},
        stop=StopCriteria(max_new_tokens=count, ignore_eos=True),
        cache=CacheOptions(file=file, **options),
    )
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert [step for step in steps if not isinstance(step, Step)] == []
    return started, steps, finished  # type: ignore[return-value]


def ids_of(steps: list[Step]) -> list[int]:
    return [step.token_id for step in steps]


def succeeded(finished: Finished) -> None:
    assert finished.error is None, finished.error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"kind": "growing"}, {"kind": "static"}], ids=["dynamic", "growing", "static"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_longer_prompt_feeds_its_new_ids_alone(
    loaded: Any, tmp_path: Path, model_type: str, options: dict[str, str]
) -> None:
    model, file = loaded(model_type), tmp_path / "cache.safetensors"
    started, steps, finished = run(model, LONG, file, **options)
    succeeded(finished)
    assert started.reused_tokens == 0
    cached = len(started.prompt_ids) + len(steps) - 1
    again_ids = [*started.prompt_ids, *ids_of(steps)[:-1], 40, 41, 42]
    expected = ids_of(run_ids(model, again_ids, None, **options)[1])
    with watched(model.model) as seen:
        started, steps, finished = run_ids(model, again_ids, file, **options)
    succeeded(finished)
    assert started.reused_tokens == cached
    assert seen.fed == [3] + [1] * (len(steps) - 1)
    assert ids_of(steps) == expected
    assert [step.cached_tokens for step in steps] == [len(again_ids) + index for index in range(len(steps))]
    if finished.kv is not None:
        assert finished.kv.total_bytes == steps[-1].kv_bytes


def run_ids(
    model: LoadedModel, ids: list[int], file: Path | None, **options: Any
) -> tuple[Started, list[Step], Finished]:
    """A run of these very ids, whatever text they are."""
    return run(replace(model, tokenizer=Fixed(model.tokenizer, ids)), "ids", file, **options)


class Fixed:
    """A tokenizer that encodes every text to the same ids."""

    def __init__(self, tokenizer: Any, ids: list[int]) -> None:
        self._tokenizer, self._ids = tokenizer, ids

    def __call__(self, *_: Any, **__: Any) -> Any:
        return {"input_ids": list(self._ids)}

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return list(self._ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "growing"}, {"kind": "static"}, {"window": 128}],
    ids=["dynamic", "growing", "static", "window"],
)
@pytest.mark.parametrize("other", ["A prompt that is longer", "A prompt", "B", LONG + " More.", LONG])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_longest_common_prefix_is_reused(
    loaded: Any, tmp_path: Path, model_type: str, other: str, options: dict[str, Any]
) -> None:
    model, file = loaded(model_type), tmp_path / "cache.safetensors"
    succeeded(run(model, LONG, file, **options)[2])
    expected = ids_of(run(model, other, None, **options)[1])
    with watched(model.model) as seen:
        started, steps, finished = run(model, other, file, **options)
    succeeded(finished)
    assert ids_of(steps) == expected
    common = next((at for at, (one, two) in enumerate(zip(LONG, other, strict=False)) if one != two), len(LONG))
    # BOS is common too, and the last token is fed in any case
    assert started.reused_tokens == min(common + 1, len(started.prompt_ids) - 1)
    assert seen.fed[0] == len(started.prompt_ids) - started.reused_tokens
    assert finished.kv is not None
    assert finished.kv.total_bytes == steps[-1].kv_bytes


@pytest.mark.parametrize("model_type", ["mistral", "lfm2_moe", "qwen3_next", "falcon_h1"])
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_cut_back_says_so(loaded: Any, tmp_path: Path, model_type: str) -> None:
    model, file = loaded(model_type), tmp_path / "cache.safetensors"
    run(model, LONG, file)
    before = file.read_bytes()
    with pytest.raises(PromptCacheMismatch, match="begins with 51 only"):
        run(model, LONG[:50] + "another end", file)
    assert file.read_bytes() == before


def test_a_window_that_is_not_full_can_be_cut_back(loaded: Any, tmp_path: Path) -> None:
    model, file = loaded("mistral"), tmp_path / "cache.safetensors"
    run(model, "abc", file, count=2)
    started, steps, _ = run(model, "abx", file)
    assert started.reused_tokens == 3
    assert ids_of(steps) == ids_of(run(model, "abx")[1])


def test_a_saved_cache_is_cut_to_the_room_of_a_smaller_static_one(loaded: Any, tmp_path: Path) -> None:
    model, file = loaded("llama"), tmp_path / "cache.safetensors"
    run(model, LONG, file, count=30, kind="static")
    started, steps, _ = run(model, "A prompt, and", file, count=2, kind="static")
    assert started.reused_tokens == 9
    assert ids_of(steps) == ids_of(run(model, "A prompt, and", count=2)[1])


# Files of something else


def test_what_differs_is_named(loaded: Any, tmp_path: Path) -> None:
    model, file = loaded("llama"), tmp_path / "cache.safetensors"
    run(model, LONG, file)
    with pytest.raises(PromptCacheMismatch, match="made with another model"):
        run(loaded("gpt2"), LONG, file)
    with pytest.raises(PromptCacheMismatch, match="cache dynamic, here static"):
        run(model, LONG, file, kind="static")
    with pytest.raises(PromptCacheMismatch, match="cache dynamic, here window; window none, here 32"):
        run(model, LONG, file, window=32)
    rewrite(file, transformers="4.0.0", dtype="bfloat16")
    with pytest.raises(PromptCacheMismatch, match=r"dtype bfloat16, here float32; transformers 4\.0\.0, here"):
        run(model, LONG, file)


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        ({"execution": Execution(weights="int8")}, {}, "weights none, here int8"),
        ({"execution": Execution(weights="float32")}, {}, "weights none, here float32"),
        ({"execution": Execution(engine="native")}, {"kind": "growing"}, "engine transformers"),
        ({"execution": Execution(compiled=True)}, {"kind": "static"}, "compiled none"),
        ({"dtype": torch.bfloat16}, {}, "dtype float32"),
        ({"device": torch.device("meta")}, {}, "device cpu"),
        ({}, {"kind": "growing"}, "cache dynamic"),
        ({}, {"kind": "static"}, "cache dynamic"),
        ({}, {"window": 32}, "cache dynamic, here window"),
        ({"format_version": 3}, {}, "format version 2, here 3"),
        ({"transformers": "5.99.0"}, {}, "transformers .*, here 5.99.0"),
    ],
)
def test_each_thing_that_shaped_a_cache_has_to_be_the_same(
    loaded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    options: dict[str, Any],
    named: str,
) -> None:
    model, file = loaded("llama"), tmp_path / "cache.safetensors"
    made_with = {key: value for key, value in options.items() if key == "kind" and "execution" in change}
    started, *_ = run(model, LONG, file, **made_with)
    if "format_version" in change:
        monkeypatch.setattr(prompt_cache, "FORMAT_VERSION", change.pop("format_version"))
    if "transformers" in change:
        monkeypatch.setattr(prompt_cache.transformers, "__version__", change.pop("transformers"))

    def reuse(model: LoadedModel) -> Any:
        return load_prompt_cache(
            file, model, CacheOptions(file=file, **options), max_tokens=500, prompt_ids=started.prompt_ids
        )

    with pytest.raises(PromptCacheMismatch, match=named):
        reuse(replace(model, **change))
    monkeypatch.undo()
    if options == made_with:
        assert len(reuse(model)[1]) == len(started.prompt_ids) - 1
    assert run(model, LONG, file, **made_with)[0].reused_tokens == len(started.prompt_ids) - 1


def test_packed_weights_do_not_use_what_others_have_cached(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    run(load(inspect_checkpoint(tiny_llama), dtype="float32", device="cpu"), LONG, file)
    packed = load(inspect_checkpoint(tiny_llama), device="cpu", execution=Execution(weights="int8"))
    with pytest.raises(PromptCacheMismatch, match="weights none, here int8"):
        run(packed, LONG, file)
    plain = run(packed, LONG)[1]
    run(packed, LONG, tmp_path / "own")
    started, steps, _ = run(packed, LONG, tmp_path / "own")
    assert started.reused_tokens == len(started.prompt_ids) - 1
    assert ids_of(steps) == ids_of(plain)


def test_other_weights_of_the_same_shape_are_another_model(tmp_path: Path) -> None:
    folder, file = tmp_path / "tiny", tmp_path / "cache.safetensors"
    folder.mkdir()
    save_tiny_checkpoint(folder)
    run(load(inspect_checkpoint(folder), dtype="float32"), LONG, file)
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[-1]
    weights[name].view(-1)[-1] += 1.0  # one number of one tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PromptCacheMismatch, match="other weights of that name"):
        run(load(inspect_checkpoint(folder), dtype="float32"), LONG, file)


def rewrite(file: Path, tensors: dict[str, torch.Tensor] | None = None, **metadata: str) -> None:
    """The file with other metadata, or other tensors."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    saved = json.loads(raw[8 : 8 + size])["__metadata__"]
    save_file({**load_file(file), **(tensors or {})}, file, metadata={**saved, **metadata})


@pytest.mark.parametrize(
    "damage",
    [
        "empty",
        "text",
        "cut",
        "header",
        "no metadata",
        "ids",
        "float ids",
        "shape",
        "batch",
        "layers",
        "name",
        "index",
        "integers",
        "escape",
    ],
)
def test_a_damaged_file_is_one_line(loaded: Any, tmp_path: Path, damage: str) -> None:
    model, file = loaded("llama"), tmp_path / "cache.safetensors"
    run(model, LONG, file)
    raw, tensors = file.read_bytes(), load_file(file)
    keys = tensors["layers.0.keys"]
    damages: dict[str, Any] = {
        "empty": lambda: file.write_bytes(b""),
        "text": lambda: file.write_text("hello"),
        "cut": lambda: file.write_bytes(raw[:-100]),
        "header": lambda: file.write_bytes((1 << 60).to_bytes(8, "little") + raw[8:]),
        "no metadata": lambda: save_file(tensors, file),
        "ids": lambda: rewrite(file, {"token_ids": tensors["token_ids"][:-2].clone()}),
        "float ids": lambda: rewrite(file, {"token_ids": tensors["token_ids"].float()}),
        "shape": lambda: rewrite(file, {"layers.0.keys": keys[..., :-1].contiguous()}),
        "batch": lambda: rewrite(file, {"layers.0.keys": keys.reshape(2, 1, *keys.shape[2:])}),
        "layers": lambda: rewrite(file, layers="[" * 10_000),
        "name": lambda: rewrite(file, {"surprise": torch.zeros(1)}),
        "integers": lambda: rewrite(file, {"layers.0.keys": keys.view(torch.int32)}),
        "escape": lambda: rewrite(file, model="x", model_name="\x1b[31m\nerror: none"),
        "index": lambda: rewrite(file, {"layers.99.keys": torch.zeros(1)}),
    }
    damages[damage]()
    with pytest.raises(PromptCacheMismatch) as caught:
        run(model, LONG, file)
    assert str(file) in caught.value.message
    assert caught.value.message.isprintable()


# Writing


def test_a_failed_write_leaves_the_old_file_and_the_text(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = loaded("llama"), tmp_path / "cache.safetensors"
    run(model, LONG, file)
    before = file.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llminfer.engine.prompt_cache.save_file", full)
    _, steps, finished = run(model, LONG, file)
    assert len(steps) == 6
    assert isinstance(finished.error, GenerationFailed)
    assert "No space left on device" in finished.error.message
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file], "nothing is left beside it"


def test_the_file_is_for_its_owner_alone(loaded: Any, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    run(loaded("llama"), LONG, file)
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_run_is_saved_as_far_as_it_came(loaded: Any, tmp_path: Path) -> None:
    model, file = loaded("llama"), tmp_path / "cache.safetensors"
    events = generate(
        model,
        LONG,
        raw=True,
        sampling={"temperature": 0},
        stop=StopCriteria(max_new_tokens=20, ignore_eos=True),
        cache=CacheOptions(file=file),
    )
    for event in events:
        if isinstance(event, Step) and event.index == 3:
            break
    finished = events.throw(KeyboardInterrupt())
    assert isinstance(finished, Finished)
    assert finished.reason == "interrupted"
    assert len(load_file(file)["token_ids"]) == len(LONG) + 1 + 3
    assert ids_of(run(model, LONG + "!", file)[1]) == ids_of(run(model, LONG + "!")[1])


def test_what_keeps_its_cache_elsewhere_is_refused_before_it_runs(loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(LlminferError, match="cache of their own"):
        run(loaded("rwkv"), LONG, tmp_path / "cache.safetensors")


# Across processes, and on the real model


def test_the_second_process_reuses_what_the_first_has_cached(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    documents = []
    for prompt, extra in (("Once upon", []), ("Once upon a time", []), ("Once upon a time", ["plain"])):
        command = [sys.executable, "-m", "llminfer", "generate", prompt, "--model", str(tiny_llama), "--raw", "--json"]
        command += ["-t", "0", "-n", "5", "--ignore-eos", "--dtype", "float32"]
        command += [] if extra else ["--prompt-cache", str(file)]
        result = subprocess.run(command, capture_output=True, check=True)
        documents.append(json.loads(result.stdout))
    first, second, plain = documents
    assert first["kv_cache"]["reused_tokens"] == plain["kv_cache"]["reused_tokens"] == 0
    assert second["kv_cache"]["reused_tokens"] == len("Once upon") + 1
    assert second["token_ids"] == plain["token_ids"]
    assert second["kv_cache"]["measured_bytes"] == second["kv_cache"]["predicted_bytes"]


@pytest.mark.slow
def test_the_real_model_reuses_a_long_prompt(smollm: Any, tmp_path: Path) -> None:
    file, story = tmp_path / "cache.safetensors", "The quick brown fox jumps over the lazy dog. " * 20
    run(smollm, story, file, count=4)
    longer = story + "Now tell me in one word: who jumps?"
    expected = ids_of(run(smollm, longer, count=12)[1])
    with watched(smollm.model) as seen:
        started, steps, finished = run(smollm, longer, file, count=12)
    succeeded(finished)
    assert started.reused_tokens > 150
    assert seen.fed[0] == len(started.prompt_ids) - started.reused_tokens < 20
    assert ids_of(steps) == expected
    assert finished.kv is not None
    assert finished.kv.total_bytes == steps[-1].kv_bytes


def test_weights_are_hashed_once_while_they_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    digest = prompt_cache.model_digest(folder)
    opened, usual = [], Path.open

    def noted(path: Path, *arguments: Any, **keywords: Any) -> Any:
        opened.append(path)
        return usual(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", noted)
    prompt_cache._files_digest.cache_clear()  # as another process would begin
    assert prompt_cache.model_digest(folder) == digest
    assert weights not in opened
    weights.write_bytes(b"WEIGHTS")
    assert prompt_cache.model_digest(folder) != digest
    assert weights in opened
