"""Converting GGUF files: against transformers' own reading of them, and against crashes, races and hostile files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2Config

import llminfer.engine.checkpoints.gguf as conversion
from llminfer.engine.checkpoints import conversions
from llminfer.engine.checkpoints.builtin import DEFAULT_GENERATION, find_default_model
from llminfer.engine.checkpoints.conversions import cached_checkpoint, checkpoint_folder, read_manifest
from llminfer.engine.checkpoints.gguf import checkpoint_for_gguf
from llminfer.errors import LlminferError, ModelNotAvailable, UnsupportedArchitecture
from tests.tiny_gguf import (
    BOS,
    CHAT_TEMPLATE,
    CONTEXT,
    END,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TOKENS,
    USER,
    add_metadata,
    write_tensors,
    write_tiny_llama,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for each test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLMINFER_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf")


def read_json(path: Path) -> dict[str, object]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def their_state(path: Path) -> Mapping[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state: Mapping[str, torch.Tensor] = model.state_dict()
    return state


def assert_same_tensors(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


# What comes out


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_weights_are_those_of_transformers_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", tied=tied)
    folder = checkpoint_for_gguf(path)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert_same_tensors(model.state_dict(), their_state(path))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied


def test_the_folder_is_a_plain_checkpoint(tiny: Path) -> None:
    folder = checkpoint_for_gguf(tiny)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "llminfer.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = read_json(folder / "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "max_position_embeddings": CONTEXT,
        "vocab_size": len(TOKENS),
        "head_dim": HIDDEN // HEADS,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert "quantization_config" not in config


def test_generation_config_has_the_ids_and_the_defaults(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", edit=lambda writer: writer.add_eot_token_id(USER))
    folder = checkpoint_for_gguf(path, generation_defaults=DEFAULT_GENERATION)
    content = read_json(folder / "generation_config.json")
    content.pop("transformers_version")
    assert content == {
        "bos_token_id": BOS,
        "eos_token_id": [END, USER],
        "pad_token_id": END,
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert (loaded.eos_token_id, loaded.temperature, loaded.do_sample) == ([END, USER], 0.2, True)


def test_ids_that_the_file_lacks_are_not_those_of_the_class(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", ids=False)
    folder = checkpoint_for_gguf(path)
    config = read_json(folder / "config.json")
    assert [config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")] == [None, None, None]
    assert "eos_token_id" not in read_json(folder / "generation_config.json")
    assert AutoTokenizer.from_pretrained(folder).eos_token is None


@pytest.mark.parametrize("add_bos", [None, False, True])
def test_the_tokenizer_loads_alike_both_ways(add_bos: bool | None, tmp_path: Path) -> None:
    folder = checkpoint_for_gguf(write_tiny_llama(tmp_path / "tiny.gguf", add_bos=add_bos))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lean = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = [BOS] if add_bos else []
    for text in ("hello hello", "<|user|>hello<|end|> x", "  a , b . ", "é\n\tß", ""):
        ids = tokenizer(text).input_ids
        assert ids == lean.encode(text).ids
        assert ids[: len(start)] == start
        # no clean-up of the spaces before punctuation
        assert tokenizer.decode(ids[len(start) :]) == text
    assert tokenizer("<|user|>hello<|end|>").input_ids == [*start, USER, TOKENS.index("hello"), END]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == (
        "<|user|>hello<|end|>"
    )
    settings = read_json(folder / "tokenizer_config.json")
    assert (settings["chat_template"], settings["clean_up_tokenization_spaces"]) == (CHAT_TEMPLATE, False)
    assert settings.get("add_bos_token") is add_bos


@pytest.mark.parametrize(
    ("pre", "digits", "n_warnings"),
    [
        ("smollm", ["1", "2"], 0),
        ("refact", ["1", "2"], 0),
        ("gpt-2", ["12"], 0),
        ("llama-bpe", ["12"], 0),
        ("qwen2", ["1", "2"], 0),
        ("default", ["12"], 1),
        ("of-tomorrow", ["12"], 1),
        (None, ["12"], 1),
    ],
)
def test_digits_are_split_as_the_file_says(pre: str | None, digits: list[str], n_warnings: int, tmp_path: Path) -> None:
    folder = checkpoint_for_gguf(write_tiny_llama(tmp_path / "tiny.gguf", pre=pre))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("12").tokens == digits
    manifest = read_manifest(folder)
    assert manifest is not None
    assert len(manifest.warnings) == n_warnings
    assert all("splits text" in warning and "GPT-2" in warning for warning in manifest.warnings)


def test_every_block_type_is_dequantized_as_the_gguf_package_does() -> None:
    rng = np.random.default_rng(0)
    for kind, (block_elements, block_bytes) in conversion.GGML_BLOCK.items():
        raw = rng.integers(0, 256, size=(3, 2 * block_bytes), dtype=np.uint8)
        tensor = conversion.GgufTensor(name="t", shape=(2 * block_elements, 3), ggml_type=kind, offset=0)
        mine = conversion._dequantized_blocks(torch.from_numpy(raw.reshape(-1)), tensor).numpy()
        with np.errstate(all="ignore"):
            theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind)).reshape(-1)
        np.testing.assert_array_equal(mine, theirs)


def test_types_that_only_the_gguf_package_knows_are_converted(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", attention=gguf.GGMLQuantizationType.Q5_1)
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(checkpoint_for_gguf(path)).state_dict(), their_state(path))


# Rope scaling


def llama3_divisors(factor: float) -> list[float]:
    """As llama.cpp's converter writes them, for a rope base of 5000 and heads of 16."""
    divisors = []
    for index in range(8):
        wavelength = 2 * np.pi * 5000.0 ** (index / 8)
        smooth = (8192 / wavelength - 1) / 3
        inner = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else inner)
    return divisors


def test_llama3_rope_scaling_is_recovered_from_its_tensor(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(llama3_divisors(32.0), dtype=np.float32))

    folder = checkpoint_for_gguf(write_tiny_llama(tmp_path / "tiny.gguf", edit=edit))
    assert read_json(folder / "config.json")["rope_parameters"] == {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5000.0,
        "rope_type": "llama3",
    }
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 5000.0 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(plain / model.model.rotary_emb.inv_freq, torch.tensor(llama3_divisors(32.0)))


def test_rope_scaling_that_we_cannot_tell_is_a_warning(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 7, 8, dtype=np.float32))

    manifest = read_manifest(checkpoint_for_gguf(write_tiny_llama(tmp_path / "tiny.gguf", edit=edit)))
    assert manifest is not None
    assert ["rope scaling" in warning for warning in manifest.warnings] == [True]


def test_linear_rope_scaling_is_carried_over(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    folder = checkpoint_for_gguf(write_tiny_llama(tmp_path / "tiny.gguf", edit=edit))
    scaling = {"factor": 4.0, "rope_theta": 5000.0, "rope_type": "linear"}
    assert read_json(folder / "config.json")["rope_parameters"] == scaling


# Once, whole, and found again


def test_the_second_call_neither_converts_nor_hashes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_checkpoint(tiny) is None
    stages: list[str] = []
    folder = checkpoint_for_gguf(tiny, progress=lambda stage, done, total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["hash", "convert", "tokenizer"]

    def refuse(*arguments: object) -> None:
        raise AssertionError("called again")

    monkeypatch.setattr(conversion, "_convert", refuse)
    stages.clear()
    assert checkpoint_for_gguf(tiny, progress=lambda stage, done, total: stages.append(stage)) == folder
    assert cached_checkpoint(tiny) == folder
    assert stages == []


def test_a_copy_is_hashed_and_not_converted_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint_for_gguf(tiny)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    monkeypatch.setattr(conversion, "_convert", None)
    assert cached_checkpoint(copy) is None
    assert checkpoint_for_gguf(copy) == folder
    assert cached_checkpoint(copy) == folder


def test_new_content_under_the_same_name_is_noticed(tiny: Path) -> None:
    folder = checkpoint_for_gguf(tiny)
    status = tiny.stat()
    write_tiny_llama(tiny, seed=1)
    assert tiny.stat().st_size == status.st_size
    # as an installer does that takes the time from its archive
    os.utime(tiny, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_checkpoint(tiny) is None
    assert checkpoint_for_gguf(tiny) != folder


def test_the_key_depends_on_all_that_shapes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {checkpoint_folder("0" * 64), checkpoint_folder("1" * 64)}
    folders.add(checkpoint_folder("0" * 64, generation_defaults={"top_p": 0.9}))
    monkeypatch.setattr(conversions, "CONVERSION_FORMAT", 99)
    folders.add(checkpoint_folder("0" * 64))
    for name in ("transformers", "gguf", "tokenizers"):
        versions = {**conversions.shaping_versions(), name: "99.0"}
        monkeypatch.setattr(conversions, "shaping_versions", lambda versions=versions: versions)
        folders.add(checkpoint_folder("0" * 64))
        monkeypatch.undo()
    assert len(folders) == 7


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_crash_in_the_middle_leaves_nothing(
    error: BaseException, tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "save_tokenizer", crash)
        with pytest.raises(type(error)):
            checkpoint_for_gguf(tiny)
    assert names_in(cache / "checkpoints") == []
    assert cached_checkpoint(tiny) is None
    assert read_manifest(checkpoint_for_gguf(tiny)) is not None


def test_what_a_killed_run_left_is_removed_but_not_what_is_being_written(tiny: Path, cache: Path) -> None:
    checkpoints = cache / "checkpoints"
    for name in ("dead", "alive"):
        (checkpoints / f".{name}.x1.tmp").mkdir(parents=True)
        (checkpoints / f".{name}.x1.tmp" / "model.safetensors").write_bytes(b"half")
    with FileLock(checkpoints / ".alive.lock"):
        folder = checkpoint_for_gguf(tiny)
    assert names_in(checkpoints) == sorted([".alive.x1.tmp", folder.name])


@pytest.mark.parametrize(
    ("theirs", "stays"),
    [
        ({"transformers": "5.9.1"}, False),
        ({"transformers": "5.24.0.dev1"}, False),
        ({"gguf": conversions.NOT_INSTALLED}, False),
        ({"transformers": "5.30.0"}, True),  # a newer installation's
        ({"transformers": "5.24.0.post1"}, True),
        ({"transformers": "no version"}, True),
        ({"transformers": "5.9.1", "gguf": "9.0.0"}, True),  # neither older nor newer
        ({}, True),  # of the same versions, with other generation defaults
    ],
)
def test_what_older_versions_made_of_the_same_file_is_removed(
    theirs: dict[str, str], stays: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"gguf": "0.17.1", "tokenizers": "0.22.0", "transformers": "5.24.0"}
    other = _conversion("d", "other", {**ours, **theirs}, monkeypatch)
    another_file = _conversion("e", "another", {**ours, "transformers": "5.0.0"}, monkeypatch)
    new = _conversion("d", "new", ours, monkeypatch)
    assert read_manifest(new) is not None
    assert (read_manifest(other) is not None) is stays
    assert read_manifest(another_file) is not None
    assert not list(new.parent.glob(".*.tmp"))


def test_what_older_versions_made_stays_while_it_is_locked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _conversion("d", "old", {"transformers": "5.9.1"}, monkeypatch)
    with FileLock(old.with_name(f".{old.name}.lock")):
        _conversion("d", "new", {"transformers": "5.24.0"}, monkeypatch)
    assert read_manifest(old) is not None


def _conversion(digest: str, name: str, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion that these versions made."""
    monkeypatch.setattr(conversions, "shaping_versions", lambda: versions)

    def build(into: Path) -> tuple[str, ...]:
        (into / "model.safetensors").write_bytes(b"weights")
        return ()

    folder = conversions.cache_folder() / "checkpoints" / name
    return conversions.build_checkpoint(folder, build, source="s", digest=digest)


@pytest.mark.parametrize("damage", ["cut weights", "no manifest", "broken manifest", "another format"])
def test_a_damaged_checkpoint_is_made_again(damage: str, tiny: Path) -> None:
    folder = checkpoint_for_gguf(tiny)
    weights = (folder / "model.safetensors").read_bytes()
    manifest = folder / "llminfer.json"
    if damage == "cut weights":
        (folder / "model.safetensors").write_bytes(weights[:-1])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps({**read_json(manifest), "format": 0}))
    assert cached_checkpoint(tiny) is None
    assert checkpoint_for_gguf(tiny) == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert names_in(folder.parent) == [folder.name]


RACER = """
    import sys, time
    from pathlib import Path
    from llminfer.engine.checkpoints.conversions import build_checkpoint, checkpoint_folder

    def build(folder):
        with open(sys.argv[1], "a") as log:
            log.write("built\\n")
        (folder / "model.safetensors").write_bytes(b"w" * 1000)
        time.sleep(0.5)
        return ()

    stages = []
    folder = build_checkpoint(checkpoint_folder("0" * 64), build, source="s", digest="d",
                              progress=lambda stage, done, total: stages.append(stage))
    print((folder / "model.safetensors").stat().st_size, *stages)
    assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""


def test_two_processes_at_once_build_one_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", textwrap.dedent(RACER), str(log)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(racer.communicate(timeout=60)[0].strip() for racer in racers)
    assert [racer.returncode for racer in racers] == [0, 0]
    assert outputs[0] == "1000"
    # the second one waited, or came so late that there was nothing to wait for
    assert outputs[1] in ("1000 wait", "1000")
    assert log.read_text() == "built\n"


def test_a_race_without_working_locks_ends_with_the_winners_checkpoint(tiny: Path, cache: Path) -> None:
    folder = checkpoint_folder("0" * 64)

    def build(into: Path) -> tuple[str, ...]:
        (into / "model.safetensors").write_bytes(b"mine")
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"theirs")
        conversions._write_manifest(folder, source="s", digest="d", warnings=())
        return ()

    assert conversions.build_checkpoint(folder, build, source="s", digest="d") == folder
    assert (folder / "model.safetensors").read_bytes() == b"theirs"
    assert names_in(folder.parent) == [folder.name]


def test_a_full_disk_is_one_line_with_a_hint(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = conversions.shutil.disk_usage(tiny.parent)
    monkeypatch.setattr(conversions.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(LlminferError, match="No space left on device") as caught:
        checkpoint_for_gguf(tiny)
    assert "LLMINFER_CACHE" in (caught.value.hint or "")
    assert names_in(cache / "checkpoints") == []


def test_a_cache_that_cannot_be_written_is_one_line_with_a_hint(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMINFER_CACHE", str(tiny))
    with pytest.raises(LlminferError, match="cannot write to the cache") as caught:
        checkpoint_for_gguf(tiny)
    assert "LLMINFER_CACHE" in (caught.value.hint or "")


# What is refused


def set_number(key: str, value: int) -> Callable[[gguf.GGUFWriter], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        for values in writer.kv_data:
            values.pop(key, None)
        writer.add_uint32(key, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (set_number("llama.attention.head_count", 0), "does not describe a model"),
        (set_number("llama.block_count", 1 << 31), "claims 2147483648 layers, but holds 20 tensors"),
        (set_number("llama.embedding_length", 128), "has the shape"),
        (set_number("llama.feed_forward_length", 1 << 31), "describes 824633762880 parameters"),
        (set_number("general.alignment", 48), "not a power of two"),
        (set_number("tokenizer.ggml.eos_token_id", 9999), "its eos_token_id 9999 is outside its vocabulary"),
        (set_number("split.count", 3), "one of 3 parts"),
        (set_number("tokenizer.ggml.tokens", 7), "holds no vocabulary"),
    ],
)
def test_a_file_that_contradicts_itself_is_one_line(
    edit: Callable[[gguf.GGUFWriter], None], expected: str, tmp_path: Path
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", edit=edit)
    with pytest.raises(ModelNotAvailable, match=expected) as caught:
        checkpoint_for_gguf(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_tensor_is_named_and_not_made_up(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", leave_out="blk.1.attn_q.weight")
    with pytest.raises(ModelNotAvailable, match=r"lacks 1 tensors .* model\.layers\.1\.self_attn\.q_proj\.weight"):
        checkpoint_for_gguf(path)


def test_a_tensor_without_a_place_is_a_warning(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.novelty.weight", np.zeros(4, dtype=np.float32))

    manifest = read_manifest(checkpoint_for_gguf(write_tiny_llama(tmp_path / "tiny.gguf", edit=edit)))
    assert manifest is not None
    assert manifest.warnings == ("tiny.gguf: 1 tensors have no place in the model, such as 'blk.0.novelty.weight'",)


@pytest.mark.parametrize("architecture", ["clip", "rwkv7", "t5"])
def test_an_unknown_architecture_is_named_beside_the_known(architecture: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", architecture=architecture)
    with pytest.raises(UnsupportedArchitecture, match=f"'{architecture}'") as caught:
        checkpoint_for_gguf(path)
    assert "llama, mamba" in (caught.value.hint or "")


# The other road, and the real thing


def test_an_architecture_of_the_second_road_is_converted(tmp_path: Path) -> None:
    path = write_tiny_lfm2(tmp_path / "lfm2.gguf")
    folder = checkpoint_for_gguf(path)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert isinstance(model.config, Lfm2Config)
    assert model.config.layer_types == ["conv", "full_attention"]
    assert_same_tensors(model.state_dict(), their_state(path))


def write_tiny_lfm2(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "lfm2")
    add_metadata(writer, pre="lfm2", add_bos=None, ids=True)
    set_number("lfm2.vocab_size", len(TOKENS))(writer)
    writer.add_array("lfm2.attention.head_count_kv", [0, KV_HEADS])
    writer.add_shortconv_l_cache(3)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "token_embd_norm.weight": (HIDDEN,),
        "blk.0.shortconv.conv.weight": (HIDDEN, 3),
        "blk.0.shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN),
        "blk.0.shortconv.out_proj.weight": (HIDDEN, HIDDEN),
        "blk.1.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.1.attn_k.weight": (HIDDEN // 2, HIDDEN),
        "blk.1.attn_v.weight": (HIDDEN // 2, HIDDEN),
        "blk.1.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.1.attn_q_norm.weight": (HIDDEN // HEADS,),
        "blk.1.attn_k_norm.weight": (HIDDEN // HEADS,),
    }
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{layer}.ffn_{name}.weight": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (HIDDEN, FEED_FORWARD)
    return write_tensors(writer, shapes, attention=gguf.GGMLQuantizationType.Q8_0, leave_out=None, seed=0)


@pytest.mark.slow
def test_the_default_model_is_that_of_transformers_bit_for_bit() -> None:
    path = find_default_model()
    assert path is not None
    folder = checkpoint_for_gguf(path, generation_defaults=DEFAULT_GENERATION)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.warnings == ()
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(folder).state_dict(), their_state(path))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # the ids of the original tokenizer
    assert tokenizer.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("  multiple   spaces").ids == [216, 2701, 256, 5600]
