"""Checkpoints that lack something, lie about something or bring code: refused in one line, before a token."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.load import _check_quantization
from llminfer.errors import LlminferError, ModelNotAvailable
from tests.tiny_checkpoints import byte_level_tokenizer

RunCli = Callable[..., tuple[int, bytes, str]]
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same in two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    homes = {name: FIRST if name in names[: len(names) // 2] else SECOND for name in names}
    for shard in (FIRST, SECOND):
        save_file({name: tensors[name] for name in names if homes[name] == shard}, folder / shard, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder


@pytest.fixture
def refuse(run_cli: RunCli) -> Callable[..., str]:
    """Runs a model that must be refused without a token; its standard error."""

    def run(folder: Path, *options: str | Path, code: int = 3) -> str:
        exit_code, out, err = run_cli("generate", "hello prompt", "-m", folder, "-n", "3", *options)
        assert exit_code == code, err
        assert out == b""
        assert err.startswith("error: ")
        assert [line.split(":")[0] for line in err.splitlines()] in (["error"], ["error", "hint"])
        return err

    return run


def edit_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON object on disk."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def write_header(file: Path, header: bytes, *, length: int | None = None, data: bytes = b"") -> None:
    """A safetensors file with this header, of whatever length it says."""
    file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def as_pickle(folder: Path, content: Any = None) -> Path:
    """Replace the safetensors file by a pytorch_model.bin."""
    weights = load_file(folder / "model.safetensors") if content is None else content
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


# Shards and headers


def test_shards_run_as_one_file_does(run_cli: RunCli, tiny_llama: Path, sharded: Path) -> None:
    options = ("-n", "5", "--temperature", "0", "-q")
    assert run_cli("generate", "a", "-m", sharded, *options) == run_cli("generate", "a", "-m", tiny_llama, *options)


def remove_second(folder: Path) -> str:
    (folder / SECOND).unlink()
    return f"{INDEX} names {SECOND}, which is not in"


def truncate_first(folder: Path) -> str:
    content = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(content[:-100])
    return f"{FIRST} has {len(content) - 100} bytes, its header says {len(content)}"


def extend_first(folder: Path) -> str:
    content = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(content + b"x")
    return f"{FIRST} has {len(content) + 1} bytes, its header says {len(content)}"


def index_too_much(folder: Path) -> str:
    homes = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map={**homes, "model.extra.weight": FIRST})
    return f"{FIRST} lacks the tensor model.extra.weight, which {INDEX} places there"


def index_leads_out(folder: Path) -> str:
    shutil.move(folder / SECOND, folder.parent / SECOND)
    homes = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(
        folder / INDEX, weight_map={name: home if home == FIRST else f"../{SECOND}" for name, home in homes.items()}
    )
    return f"{INDEX} names ../{SECOND}, which is not in"


def index_leads_to_root(folder: Path) -> str:
    edit_json(folder / INDEX, weight_map={"a": str(folder.parent / FIRST)})
    shutil.copy(folder / FIRST, folder.parent / FIRST)
    return "which is not in"


def index_is_no_json(folder: Path) -> str:
    (folder / INDEX).write_text('{"weight_map": {')
    return f"{folder / INDEX} is not JSON"


def index_has_no_map(folder: Path) -> str:
    (folder / INDEX).write_text("{}")
    return "has no weight_map"


def index_maps_to_a_list(folder: Path) -> str:
    edit_json(folder / INDEX, weight_map={"a": [FIRST], "b": 3, "c": None})
    return "which is not in"


def garbage_header(folder: Path) -> str:
    write_header(folder / FIRST, b"\xff\x00 no JSON at all")
    return f"{FIRST} has no readable safetensors header"


def header_of_another_kind(folder: Path) -> str:
    write_header(folder / FIRST, b"[1, 2]")
    return f"{FIRST} has no readable safetensors header"


def offsets_of_another_kind(folder: Path) -> str:
    write_header(folder / FIRST, b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}', data=b"abcd")
    return f"{FIRST} has no readable safetensors header"


def offsets_too_few(folder: Path) -> str:
    write_header(folder / FIRST, b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}', data=b"abcd")
    return f"{FIRST} has no readable safetensors header"


def deep_header(folder: Path) -> str:
    write_header(folder / FIRST, b"[" * 200_000)
    return f"{FIRST} has no readable safetensors header"


def huge_header(folder: Path) -> str:
    write_header(folder / FIRST, b"{}", length=2**60)
    return f"{FIRST} ends inside its header"


def empty_shard(folder: Path) -> str:
    (folder / FIRST).write_bytes(b"")
    return f"{FIRST} is empty"


@pytest.mark.parametrize(
    "damage",
    [
        remove_second,
        truncate_first,
        extend_first,
        index_too_much,
        index_leads_out,
        index_leads_to_root,
        index_is_no_json,
        index_has_no_map,
        index_maps_to_a_list,
        garbage_header,
        header_of_another_kind,
        offsets_of_another_kind,
        offsets_too_few,
        deep_header,
        huge_header,
        empty_shard,
    ],
)
def test_damaged_shards_are_refused_by_name(
    sharded: Path, refuse: Callable[..., str], damage: Callable[[Path], str]
) -> None:
    assert damage(sharded) in refuse(sharded)


def test_a_single_file_is_checked_when_it_is_the_one_that_loads(sharded: Path, refuse: Callable[..., str]) -> None:
    # transformers takes the single file when both are there, so a whole set of shards proves nothing
    (sharded / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in refuse(sharded)


def test_the_file_that_the_config_names_is_the_one_that_is_checked(folder: Path, refuse: Callable[..., str]) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "other.safetensors").write_bytes(content[:-100])
    edit_json(folder / "config.json", transformers_weights="other.safetensors")
    assert "other.safetensors has" in refuse(folder)


def test_the_config_cannot_name_weights_outside_the_folder(folder: Path, refuse: Callable[..., str]) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")
    edit_json(folder / "config.json", transformers_weights="../model.safetensors")
    assert "no weights in" in refuse(folder)


def test_offsets_that_contradict_the_shapes_are_refused(folder: Path, refuse: Callable[..., str]) -> None:
    # the file ends where its header says, so this is for the library to find
    write_header(
        folder / "model.safetensors",
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]},'
        b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        data=b"abcdefgh",
    )
    assert "cannot load the weights" in refuse(folder)


def test_unreadable_weights_are_one_line(
    folder: Path, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def deny(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    assert "model.safetensors: Permission denied" in refuse(folder)


# Weights against the model


def test_a_left_out_tensor_is_never_made_up(folder: Path, refuse: Callable[..., str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    err = refuse(folder)
    assert "lacks 1 of the model's weights, model.layers.1.mlp.up_proj.weight among them" in err


def test_a_tensor_of_another_shape_is_named(folder: Path, refuse: Callable[..., str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-5].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    err = refuse(folder)
    assert "lm_head.weight has the shape (254, 32), the model needs (259, 32)" in err


def test_a_tensor_without_a_place_is_noted(folder: Path, run_cli: RunCli) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, out, _ = run_cli("generate", "a", "-m", folder, "-n", "1", "--json")
    assert code == 0
    note = "1 tensors have no place in the model, model.layers.0.self_attn.q_proj.bias among them"
    assert note in json.loads(out)["notes"]


def test_a_quantizer_that_is_not_installed_is_one_line(folder: Path, refuse: Callable[..., str]) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    assert "cannot load the weights" in refuse(folder)
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "cannot load the weights" in refuse(folder)


def test_a_quantization_that_nobody_knows_is_not_passed_over(folder: Path, refuse: Callable[..., str]) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "no-such-method"})
    err = refuse(folder, code=4)
    assert "quantized by 'no-such-method', which the installed transformers does not know" in err


@pytest.mark.parametrize("method", [{}, {"quant_method": "bitsandbytes"}], ids=["by flag", "by method"])
def test_bitsandbytes_is_known_by_either_spelling(folder: Path, refuse: Callable[..., str], method: Any) -> None:
    edit_json(folder / "config.json", quantization_config={"load_in_4bit": True, **method})
    if find_spec("bitsandbytes") is None:
        assert "requires bitsandbytes" in refuse(folder)
    else:
        _check_quantization(AutoConfig.from_pretrained(folder), str(folder))


# Adapters


def test_an_adapter_beside_the_model_is_said_not_to_be_applied(folder: Path, run_cli: RunCli) -> None:
    without = run_cli("generate", "a", "-m", folder, "-n", "4", "-t", "0", "--json")[1]
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "example/base"}')
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    document = json.loads(run_cli("generate", "a", "-m", folder, "-n", "4", "-t", "0", "--json")[1])
    assert document["token_ids"] == json.loads(without)["token_ids"]
    assert any("adapter_model.safetensors beside the model is not applied" in note for note in document["notes"])


# Pickles


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def test_pickled_weights_are_refused_with_a_way_out(folder: Path, refuse: Callable[..., str]) -> None:
    err = refuse(as_pickle(folder))
    assert "has pickled weights only (pytorch_model.bin)" in err
    assert "convert them to safetensors" in err
    assert "--allow-pickle" in err


def test_allowed_pickles_give_the_same_tokens(folder: Path, tiny_llama: Path, run_cli: RunCli) -> None:
    options = ("-n", "5", "--temperature", "0", "-q")
    expected = run_cli("generate", "a", "-m", tiny_llama, *options)
    assert expected[0] == 0
    assert run_cli("generate", "a", "-m", as_pickle(folder), "--allow-pickle", *options) == expected


def test_pickled_shards_run_and_a_missing_one_is_named(
    folder: Path, refuse: Callable[..., str], run_cli: RunCli
) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    homes = {name: f"pytorch_model-0000{1 + (name in names[:5])}-of-00002.bin" for name in names}
    for shard in set(homes.values()):
        torch.save({name: tensors[name] for name in names if homes[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    assert run_cli("generate", "a", "-m", folder, "--allow-pickle", "-n", "2", "-q")[0] == 0
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    err = refuse(folder, "--allow-pickle")
    assert "pytorch_model.bin.index.json names pytorch_model-00002-of-00002.bin, which is not in" in err


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "bare pickle"])
def test_a_hostile_pickle_never_executes(
    folder: Path, tmp_path: Path, refuse: Callable[..., str], *, legacy: bool
) -> None:
    canary = tmp_path / "canary"
    as_pickle(folder)
    buffer = io.BytesIO()
    torch.save({"lm_head.weight": Hostile(canary)}, buffer)
    (folder / "pytorch_model.bin").write_bytes(
        pickle.dumps(Hostile(canary), protocol=2) if legacy else buffer.getvalue()
    )
    refuse(folder)
    assert "the pickled weights hold more than tensors" in refuse(folder, "--allow-pickle")
    assert not canary.exists()
    # the canary does sing when torch's restricted unpickler is not in the way
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert canary.exists()


def test_safetensors_win_over_a_pickle_beside_them(
    folder: Path, tiny_llama: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    canary = tmp_path / "canary"
    torch.save({"lm_head.weight": Hostile(canary)}, folder / "pytorch_model.bin")
    options = ("-n", "3", "--temperature", "0", "-q")
    expected = run_cli("generate", "a", "-m", tiny_llama, *options)
    assert run_cli("generate", "a", "-m", folder, *options) == expected
    assert run_cli("generate", "a", "-m", folder, "--allow-pickle", *options) == expected
    assert not canary.exists()


def test_no_weights_at_all(folder: Path, refuse: Callable[..., str]) -> None:
    (folder / "model.safetensors").unlink()
    assert f"no weights in {folder}" in refuse(folder)


# Tokenizers


def without_tokenizer(folder: Path) -> Path:
    for file in folder.glob("*tokenizer*"):
        file.unlink()
    return folder


def test_no_tokenizer_files(folder: Path, refuse: Callable[..., str]) -> None:
    err = refuse(without_tokenizer(folder))
    assert f"no tokenizer in {folder} (looked for tokenizer.json, " in err
    assert "hint: give --tokenizer FOLDER" in err


def test_the_tokenizer_is_missed_before_the_weights_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # its import would fail
    without_tokenizer(folder)
    with pytest.raises((ModelNotAvailable, ImportError)):
        inspect_checkpoint(folder)


def test_the_tokenizer_of_another_folder(folder: Path, tiny_llama: Path, tmp_path: Path, run_cli: RunCli) -> None:
    # a folder with nothing else in it, as tokenizer.save_pretrained makes one
    byte_level_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = ("-n", "5", "--temperature", "0", "-q")
    expected = run_cli("generate", "a", "-m", tiny_llama, *options)
    without_tokenizer(folder)
    for place in (tmp_path / "tokenizer", tiny_llama):
        assert run_cli("generate", "a", "-m", folder, "--tokenizer", place, *options) == expected


@pytest.mark.parametrize("place", ["nowhere", "file.txt", "."])
def test_a_tokenizer_option_that_names_none(
    folder: Path, refuse: Callable[..., str], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file.txt").write_text("text")
    assert "no tokenizer in" in refuse(folder, "--tokenizer", tmp_path / place)


def test_an_unknown_tokenizer_class_is_refused_or_loads_the_same(
    folder: Path, tiny_llama: Path, run_cli: RunCli
) -> None:
    edit_json(folder / "tokenizer_config.json", tokenizer_class="NoSuchTokenizer")
    options = ("-n", "5", "--temperature", "0", "-q")
    expected = run_cli("generate", "a", "-m", tiny_llama, *options)
    # tokenizer.json says all there is to say, so the name of the class does not matter
    assert run_cli("generate", "a", "-m", folder, *options) == expected


def test_an_unknown_tokenizer_class_without_its_backend_is_one_line(folder: Path, refuse: Callable[..., str]) -> None:
    edit_json(folder / "tokenizer_config.json", tokenizer_class="NoSuchTokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    assert "cannot load the tokenizer" in refuse(folder)


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_a_damaged_tokenizer_is_one_line(folder: Path, refuse: Callable[..., str], content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    assert "cannot load the tokenizer" in refuse(folder)


# Code that a checkpoint brings


AUTO_MAP = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"}


def bring_code(folder: Path, canary: Path, **config: Any) -> Path:
    """Custom code beside the checkpoint that leaves a file when it is run."""
    (folder / "custom.py").write_text(
        f"open({str(canary)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class CustomConfig(LlamaConfig):\n    model_type = 'custom'\n"
        "class CustomModel(LlamaForCausalLM):\n    config_class = CustomConfig\n"
    )
    edit_json(folder / "config.json", auto_map=AUTO_MAP, **config)
    return folder


@pytest.fixture
def yes_on_stdin(monkeypatch: pytest.MonkeyPatch) -> io.TextIOWrapper:
    """Standard input that would agree to anything."""
    stdin = io.TextIOWrapper(io.BytesIO(b"yes\nyes\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


def test_code_is_not_run_unasked_and_nothing_is_asked(
    folder: Path, tmp_path: Path, refuse: Callable[..., str], yes_on_stdin: io.TextIOWrapper
) -> None:
    bring_code(folder, tmp_path / "canary", model_type="custom")
    err = refuse(folder)
    assert "custom needs Python code that the checkpoint brings" in err
    assert "hint: --trust-remote-code runs that code: read it first" in err
    assert not (tmp_path / "canary").exists()
    assert yes_on_stdin.read() == "yes\nyes\n"


def test_a_piped_yes_is_the_prompt_and_no_consent(
    folder: Path, tmp_path: Path, run_cli: RunCli, yes_on_stdin: io.TextIOWrapper
) -> None:
    bring_code(folder, tmp_path / "canary", model_type="custom")
    code, out, err = run_cli("generate", "-", "-m", folder)
    assert (code, out) == (3, b"")
    assert "--trust-remote-code" in err
    assert not (tmp_path / "canary").exists()


def test_a_type_that_transformers_knows_loads_without_its_code(
    folder: Path, tiny_llama: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    bring_code(folder, tmp_path / "canary")
    options = ("-n", "3", "--temperature", "0", "-q")
    assert run_cli("generate", "a", "-m", folder, *options) == run_cli("generate", "a", "-m", tiny_llama, *options)
    assert not (tmp_path / "canary").exists()


def test_a_tokenizer_with_code_is_refused_with_the_way_out(
    folder: Path, tmp_path: Path, refuse: Callable[..., str], yes_on_stdin: io.TextIOWrapper
) -> None:
    bring_code(folder, tmp_path / "canary")
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="CustomTokenizer",
        auto_map={"AutoTokenizer": ["custom.CustomTokenizer", None]},
    )
    err = refuse(folder)
    assert "the tokenizer needs Python code that the checkpoint brings" in err
    assert "--trust-remote-code" in err
    assert not (tmp_path / "canary").exists()
    assert yes_on_stdin.read() == "yes\nyes\n"


def test_trusted_code_runs(folder: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    bring_code(folder, tmp_path / "canary", model_type="custom")
    code, _, err = run_cli("generate", "a", "-m", folder, "-n", "2", "-q", "--trust-remote-code")
    assert code == 0, err
    assert (tmp_path / "canary").exists()


# Architectures


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder model"),
        ({"model_type": "bart"}, "bart is an encoder-decoder model"),
        ({"model_type": "whisper"}, "whisper is an encoder-decoder model"),
        ({"model_type": "bert"}, "bert is an encoder, which does not continue a text"),
        ({"model_type": "roberta"}, "roberta is an encoder, which does not continue a text"),
        ({"model_type": "vit"}, "vit is not a causal language model"),
        ({"model_type": "clip"}, "clip is not a causal language model"),
        ({"model_type": "no-such-type"}, "model type 'no-such-type' is unknown to the installed transformers"),
        ({"model_type": ["llama"]}, "the config names no model_type"),
        ({"model_type": ""}, "the config names no model_type"),
        ({}, "the config names no model_type"),
    ],
)
def test_other_architectures_are_named_before_anything_is_missed(
    tmp_path: Path, refuse: Callable[..., str], config: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"{tmp_path}: {reason}" in refuse(tmp_path, code=4)


def test_other_architectures_are_named_before_weights_load(
    folder: Path, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # calling it would fail
    edit_json(folder / "config.json", model_type="t5")
    assert "t5 is an encoder-decoder model" in refuse(folder, code=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"hidden_act": "no-such-act"},
        {"rope_parameters": {"rope_type": "no-such-rope"}},
        {"quantization_config": "none"},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_one_line(
    folder: Path, refuse: Callable[..., str], fields: dict[str, Any]
) -> None:
    edit_json(folder / "config.json", **fields)
    assert "cannot load the" in refuse(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"rope_type": "su2", "rope_theta": 1e4}}, "rope_parameters.rope_type is 'su2'"),
        ({"hidden_act": "swoosh"}, "hidden_act is 'swoosh'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, not a positive integer"),
        ({"dtype": "auto"}, "dtype is 'auto'"),
        ({"dtype": "torch.float16"}, "dtype is 'torch.float16'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and the weights are"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000 at a width of 32, and the weights are"),
        ({"hidden_size": 10**9}, "at a width of 1000000000, and the weights are"),
        ({"vision_config": {"depth": 10**9}}, "depth is 1000000000, more than any model has"),
        ({"head_dim": 10**309}, "an integer of 310 digits"),
    ],
    ids=str,
)
def test_the_field_that_is_wrong_is_named_with_its_value(
    folder: Path, refuse: Callable[..., str], fields: dict[str, Any], named: str
) -> None:
    edit_json(folder / "config.json", **fields)
    assert named in refuse(folder)


def test_a_field_of_another_kind_is_named_with_what_is_wrong(folder: Path, refuse: Callable[..., str]) -> None:
    edit_json(folder / "config.json", hidden_size="many")
    err = refuse(folder)
    assert "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected int" in err


def test_a_model_without_layers_is_one_line(folder: Path, refuse: Callable[..., str]) -> None:
    edit_json(folder / "config.json", num_hidden_layers=-1)
    assert "cannot run model: ValueError" in refuse(folder, code=1)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_a_config_that_is_no_object_is_one_line(folder: Path, refuse: Callable[..., str], content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in refuse(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"eos_token_id": "one"}', '{"eos_token_id": [null, "x"]}'])
def test_a_damaged_generation_config_is_not_passed_over(folder: Path, refuse: Callable[..., str], content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    assert "generation_config" in refuse(folder)


@pytest.mark.parametrize("value", ["hot", -1, float("nan"), [0.5]])
def test_a_generation_config_out_of_range_is_named_and_a_flag_overrides_it(
    folder: Path, refuse: Callable[..., str], run_cli: RunCli, value: object
) -> None:
    edit_json(folder / "generation_config.json", temperature=value)
    assert "the temperature in the model's generation_config must be a finite number" in refuse(folder, code=2)
    assert run_cli("generate", "a", "-m", folder, "-n", "1", "-q", "--temperature", "1")[0] == 0


@pytest.mark.parametrize("words", [[1], "ab", [["a"]], 3])
def test_bad_words_that_are_no_ids_are_named(folder: Path, refuse: Callable[..., str], words: object) -> None:
    edit_json(folder / "generation_config.json", bad_words_ids=words)
    assert "bad_words_ids" in refuse(folder, code=2)


def test_the_library_raises_the_same_errors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LlminferError) as caught:
        inspect_checkpoint(folder)
    assert caught.value.exit_code == 3
