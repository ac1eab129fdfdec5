"""`llminfer kv-size` as a user runs it."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llminfer.kv.runtimes.table import RUNTIMES

Cli = Callable[..., tuple[int, bytes, str]]
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
TWO_HEADS = {**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with the config of an 8B Llama."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def results(out: bytes) -> list[dict[str, Any]]:
    """The results of a strict JSON document, which is all there is."""
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["schema_version"] == 1
    found: list[dict[str, Any]] = document["results"]
    return found


# What is asked


@pytest.mark.parametrize("form", ["folder", "file", "gpt2"])
def test_a_model_is_a_folder_a_file_or_a_shipped_name(run_cli: Cli, config: Path, form: str) -> None:
    argument = {"folder": config, "file": config / "config.json", "gpt2": "gpt2"}[form]
    code, out, err = run_cli("kv-size", argument, "-N", 1024, "--bytes")
    note = "note: gpt2 states no element type: counted as float32; --dtype sets another\n"
    expected = 12 * 2 * 12 * 64 * 1024 * 4 if form == "gpt2" else 32 * 2 * 8 * 128 * 1024 * 2
    assert (code, out, err) == (0, f"{expected}\n".encode(), note if form == "gpt2" else "")
    assert run_cli("kv-size", argument, "-N", 1024, "--bytes", "--dtype", "float32")[2] == ""


def test_a_config_comes_on_standard_input(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(LLAMA)))
    assert run_cli("kv-size", "-", "-N", 1, "--bytes") == (0, b"131072\n", "")
    monkeypatch.setattr("sys.stdin", io.StringIO("{"))
    code, out, err = run_cli("kv-size", "-", "-N", 1)
    assert (code, out) == (3, b"")
    assert err.startswith("error: standard input is not JSON")


@pytest.mark.parametrize(
    ("flag", "value"), [("--layers", 10**9), ("--layers", 0), ("--kv-heads", 2**63), ("--head-dim", 10**309)]
)
def test_numbers_that_no_model_has_are_refused(run_cli: Cli, flag: str, value: int) -> None:
    sizes = {"--layers": 1, "--kv-heads": 1, "--head-dim": 1, flag: value}
    code, out, err = run_cli("kv-size", *(word for pair in sizes.items() for word in pair), "-N", 1)
    assert (code, out) == (2, b"")
    assert flag in err


def test_no_model_but_its_three_numbers(run_cli: Cli) -> None:
    code, out, err = run_cli("kv-size", "--layers", 32, "--kv-heads", 8, "--head-dim", 128, "-N", 8192)
    assert code == 0
    assert "2 · L · h_kv · d_h · N · b_e = 2 · 32 · 8 · 128 · 8192 · 2 B = 1.00 GiB" in out.decode()
    assert err == "note: no --dtype: counted as bfloat16, 2 bytes an element\n"


def test_several_models_lengths_and_batches_come_in_the_order_asked(run_cli: Cli, config: Path) -> None:
    code, out, _ = run_cli("kv-size", config, "gpt2", "-N", "2k,1Ki", "-b", "1,2", "--bytes", "--dtype", "fp16")
    llama, gpt2 = 131072, 36864
    expected = [size * tokens * batch for size in (llama, gpt2) for batch in (1, 2) for tokens in (2000, 1024)]
    assert (code, out.split()) == (0, [str(size).encode() for size in expected])


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1k..8k*2", [1000, 2000, 4000, 8000]),
        ("1Ki..4Ki+1Ki", [1024, 2048, 3072, 4096]),
        ("5,1..3+1", [5, 1, 2, 3]),
        ("1.5k", [1500]),
    ],
)
def test_ranges_of_tokens(run_cli: Cli, config: Path, text: str, lengths: list[int]) -> None:
    _, out, _ = run_cli("kv-size", config, "-N", text, "--format", "json")
    assert [result["tokens"] for result in results(out)] == lengths


def test_without_tokens_the_models_own_limit_is_taken_and_said(run_cli: Cli, config: Path) -> None:
    code, out, err = run_cli("kv-size", config, "--bytes")
    assert (code, out) == (0, b"17179869184\n")
    assert "own limit, 131072" in err
    code, _, err = run_cli("kv-size", "--layers", 1, "--kv-heads", 1, "--head-dim", 1)
    assert code == 2
    assert "give --tokens" in err


def test_a_context_beyond_the_limit_is_said(run_cli: Cli) -> None:
    code, out, err = run_cli("kv-size", "gpt2", "-N", 8192, "--format", "json")
    assert code == 0
    assert "8192 tokens are more than gpt2's own limit of 1024" in err
    assert results(out)[0]["beyond_context_limit"] is True


def test_the_shipped_configs_are_listed(run_cli: Cli) -> None:
    code, out, _ = run_cli("kv-size", "--list")
    names = out.decode().split()
    assert code == 0
    assert "llama-3.1-8b" in names
    assert names == sorted(names)
    assert json.loads(run_cli("kv-size", "--list", "--format", "json")[1])["configs"] == names


# What is refused


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        *((["--tokens", text], "--tokens") for text in ("nan", "-5", "0", "inf", "1e3", "", "1..", "8..1*2", "1..9*1")),
        *((["--batch", text], "--batch") for text in ("0", "-1", "nan", "two")),
        *((["--tp", text], "--tp") for text in ("0", "-2", "nan")),
        *((["--memory", text], "--memory") for text in ("0", "-1GiB", "nan", "24 apples", "")),
        (["--memory", "1GiB", "--weights", "nan"], "--weights"),
        (["--memory", "1GiB", "--reserve", "-1"], "--reserve"),
        (["--weights", "1GiB"], "--memory"),
        (["--dtype", "banana"], "--dtype"),
        (["--k-dtype", "q9"], "--k-dtype"),
        (["--runtime", "exllama"], "--runtime"),
        (["--format", "xml"], "--format"),
        (["--plot", "a.bmp"], "--plot"),
        (["--plot", "-", "--format", "json"], "--plot"),
        (["--bytes", "--format", "json"], "--bytes"),
        (["--layers", "3"], "--layers"),
    ],
)
def test_wrong_values_are_usage_errors_that_name_the_flag(
    run_cli: Cli, config: Path, flags: list[str], flag: str
) -> None:
    tokens = [] if "--tokens" in flags else ["-N", "10"]
    code, out, err = run_cli("kv-size", config, *tokens, *flags)
    assert (code, out) == (2, b"")
    assert err.startswith("error: ")
    assert flag in err.splitlines()[0]
    assert "Traceback" not in err


def test_an_unknown_type_lists_the_known(run_cli: Cli, config: Path) -> None:
    _, _, err = run_cli("kv-size", config, "-N", 1, "--dtype", "banana")
    for name in ("float32", "bfloat16", "float16", "fp8", "int8", "int4", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
        assert name in err


@pytest.mark.parametrize("missing", ["--layers", "--kv-heads", "--head-dim"])
def test_no_size_is_ever_filled_in(run_cli: Cli, missing: str) -> None:
    given = {"--layers": 2, "--kv-heads": 2, "--head-dim": 2}
    del given[missing]
    code, out, err = run_cli("kv-size", "-N", 1, *(part for pair in given.items() for part in pair))
    assert (code, out) == (2, b"")
    assert missing in err


@pytest.mark.parametrize("content", [{}, {"num_hidden_layers": 2}, {"model_type": "llama", "num_hidden_layers": 2}])
def test_partial_configs_are_refused(run_cli: Cli, tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    code, out, err = run_cli("kv-size", tmp_path, "-N", 1)
    assert (code, out) == (4, b"")
    assert err.startswith("error: ")


@pytest.mark.parametrize("argument", ["./modles/tiny", "/no/such", "a file.txt", "~/no/such", "x/y/z", "no-such.json"])
def test_a_mistyped_path_is_never_asked_of_the_hub(
    run_cli: Cli, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a network call"))
    code, out, err = run_cli("kv-size", argument, "-N", 1)
    assert (code, out) == (3, b"")
    assert argument in err


def test_a_two_part_name_with_a_folder_of_that_name_is_a_path(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = run_cli("kv-size", "models/tiny", "-N", 1)
    assert (code, err.splitlines()[0]) == (3, "error: no such file or folder: models/tiny")


def test_offline_a_hub_id_says_so(run_cli: Cli) -> None:
    code, out, err = run_cli("kv-size", "nobody-here/no-such-model", "-N", 1)
    assert (code, out) == (3, b"")
    assert "is not a folder here" in err
    assert "offline mode is on" in err


def test_an_unknown_name_suggests_a_shipped_one(run_cli: Cli) -> None:
    code, _, err = run_cli("kv-size", "llama-3.1-8", "-N", 1)
    assert code == 3
    assert "did you mean llama-3.1-8b" in err


@pytest.mark.parametrize("case", ["empty", "file", "gguf", "list"])
def test_what_is_no_model_is_one_line(run_cli: Cli, tmp_path: Path, case: str) -> None:
    target = tmp_path
    if case == "file":
        target = tmp_path / "a [red]file.txt"
        target.write_text("hello")
    if case == "gguf":
        target = tmp_path / "random.gguf"
        target.write_bytes(os.urandom(64))
    if case == "list":
        target = tmp_path / "config.json"
        target.write_text("[1]")
    code, out, err = run_cli("kv-size", target, "-N", 1)
    assert (code, out) == (3, b"")
    assert str(target) in err
    assert len(err.splitlines()) <= 2


def test_no_secret_and_no_traceback_in_an_error(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret123")
    for arguments in (["/no/such"], [tmp_path], ["nobody-here/x"], ["gpt2", "--tp", "5"]):
        code, out, err = run_cli("kv-size", *arguments, "-N", 1)
        assert code != 0
        assert out == b""
        assert "secret123" not in err
        assert "Traceback" not in err


def test_quantized_weights_leave_the_caches_type_alone(run_cli: Cli, tmp_path: Path) -> None:
    quantized = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert run_cli("kv-size", tmp_path, "-N", 1, "--bytes")[1] == b"131072\n"
    assert run_cli("kv-size", tmp_path, "-N", 1, "--bytes", "--kv-dtype", "q8_0")[1] == b"69632\n"


# Ranks


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_ranks(run_cli: Cli, tmp_path: Path, ranks: int, heads: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TWO_HEADS))
    code, out, _ = run_cli("kv-size", tmp_path, "-N", 100, "--tp", ranks)
    assert code == 0
    assert f" {2 * 2 * heads * 16 * 100 * 2} " in out.decode()
    assert ("each is held 2 times" in out.decode()) == (ranks == 4)


def test_ranks_that_do_not_divide(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TWO_HEADS))
    for runtime in (*RUNTIMES, "all"):
        code, out, err = run_cli("kv-size", tmp_path, "-N", 100, "--tp", 3, "--runtime", runtime)
        assert (code, out) == (2, b"")
        assert "--tp 3 does not divide 2" in err


# Memory


def test_what_fits_is_tight(run_cli: Cli, config: Path) -> None:
    code, out, _ = run_cli(
        "kv-size", config, "--memory", "24GiB", "--weights", "16060522496", "--reserve", "1GiB", "--format", "json"
    )
    (result,) = results(out)
    room = 24 * 2**30 - 16060522496 - 2**30
    assert code == 0
    assert result["budget"]["cache_bytes"] == room
    assert result["budget"]["max_tokens"] == result["tokens"] == room // 131072
    assert result["total_bytes"] <= room < result["total_bytes"] + result["bytes_per_token"]


@pytest.mark.parametrize(("tokens", "expected"), [(8192, 0), (8193, 5)])
def test_exit_code_5_when_stated_tokens_do_not_fit(run_cli: Cli, config: Path, tokens: int, expected: int) -> None:
    code, out, err = run_cli("kv-size", config, "-N", tokens, "--memory", "1GiB", "--format", "json")
    assert code == expected
    assert results(out)[0]["budget"]["fits"] is (expected == 0)
    assert results(out)[0]["budget"]["max_tokens"] == 8192
    assert ("longest context for this batch: 8192" in err) == (expected == 5)


def test_weights_come_from_the_files(run_cli: Cli, config: Path) -> None:
    code, _, err = run_cli("kv-size", config, "--memory", "1GiB", "--weights", "auto")
    assert code == 3
    assert "no weight files" in err
    header = json.dumps({"a": {"dtype": "F16", "shape": [5], "data_offsets": [0, 10]}, "__metadata__": {}}).encode()
    (config / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(10))
    _, out, _ = run_cli("kv-size", config, "--memory", "1GiB", "--weights", "auto", "--format", "json")
    assert results(out)[0]["budget"]["weights_bytes"] == 10
    # of an index without its shards, as it is there before a download, its own word counts
    (config / "model.safetensors").unlink()
    (config / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1000.0}}))
    _, out, _ = run_cli("kv-size", config, "--memory", "1GiB", "--weights", "auto", "--format", "json")
    assert results(out)[0]["budget"]["weights_bytes"] == 1000
    assert run_cli("kv-size", config, "--memory", "1GiB", "--weights", "auto", "--tp", "2")[0] == 2


# What is answered


def test_json_csv_and_table_agree(run_cli: Cli, config: Path) -> None:
    asked = ("kv-size", config, "gemma-2-9b", "-N", "1k,8k", "--runtime", "all", "--dtype", "bf16")
    found = [run_cli(*asked, "--format", form)[1].decode() for form in ("json", "csv", "table", "plain", "markdown")]
    rows = results(found[0].encode())
    assert len(rows) == 2 * 2 * len(RUNTIMES)
    lines = list(csv.DictReader(io.StringIO(found[1])))
    tables = [
        [line for line in text.splitlines() if line.lstrip(" |").startswith((str(config), "gemma"))]
        for text in found[2:]
    ]
    for index, row in enumerate(rows):
        line = lines[index]
        assert (line["model"], line["runtime"], line["tokens"]) == (row["model"], row["runtime"], str(row["tokens"]))
        total = row.get("total_bytes")
        assert line["total_bytes"] == ("" if total is None else str(total))
        for table in tables:
            assert row["runtime"] in table[index].replace("\\", "")
            if total is not None:
                assert str(total) in table[index].replace("|", " ").split()
    refused = [row for row in rows if row["refusal"]]
    assert [row["runtime"] for row in refused] == ["transformers-quantized"] * 2


def test_sizes_are_called_by_their_binary_names(run_cli: Cli, config: Path) -> None:
    _, out, _ = run_cli("kv-size", config, "-N", 8192)
    assert "1.00 GiB" in out.decode()
    assert "1073741824" in out.decode()
    for form in ("table", "plain", "markdown", "csv"):
        text = run_cli("kv-size", config, "-N", 8192, "--format", form)[1].decode()
        assert not any(f" {unit}" in text for unit in ("KB", "MB", "GB"))
    _, out, _ = run_cli("kv-size", config, "-N", 8192, "--format", "json")
    assert results(out)[0]["total_bytes"] == 1073741824


def test_it_says_steady_state_and_names_the_release(run_cli: Cli, config: Path) -> None:
    text = run_cli("kv-size", config, "-N", 1, "--runtime", "all")[1].decode()
    assert "steady state" in text
    for row in RUNTIMES.values():
        assert f"{row.name}: {row.release}" in text


def test_layers_and_fields_with_their_origin(run_cli: Cli) -> None:
    code, out, _ = run_cli("kv-size", "gemma-3-4b", "-N", 2000, "--layers-table", "--format", "json")
    (result,) = results(out)
    assert code == 0
    assert len(result["layers"]) == 34
    assert result["layers"][0]["kind"] == "sliding"
    assert (result["layers"][0]["kept_tokens"], result["layers"][0]["window"]) == (1023, 1024)
    assert sum(layer["bytes"] for layer in result["layers"]) == result["total_bytes"]
    origins = {field["name"]: field["from"] for field in result["fields"]}
    assert origins["num_hidden_layers"] == "file"
    assert "transformers 5" in origins["num_key_value_heads"]
    for form in ("table", "plain", "markdown", "csv"):
        text = run_cli("kv-size", "gemma-3-4b", "-N", 2000, "--layers-table", "--format", form)[1].decode()
        assert text.count("sliding") >= (29 if form == "csv" else 5)
        assert form == "csv" or "0–4, each" in text


def test_names_with_brackets_stay_whole_and_piped_lines_uncut(run_cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / ("[bold]x[key] :smile: " + "long " * 20 + "name")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for form in ("table", "plain", "csv", "json"):
        text = run_cli("kv-size", folder, "-N", 8192, "--format", form)[1].decode()
        assert str(folder) in text
        assert "1073741824" in text


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({}, False),
        ({"NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "0"}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"GITHUB_ACTIONS": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colour_only_where_asked(
    run_cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, out, _ = run_cli("kv-size", config, "-N", 1)
    assert code == 0
    assert (b"\x1b" in out) == coloured
    assert b"\x1b" not in run_cli("kv-size", config, "-N", 1, "--format", "plain")[1]
    assert "\x1b" not in run_cli("kv-size", config, "-N", 0)[2]
    assert b"\x1b" not in run_cli("kv-size", "--help")[1]


def test_neither_torch_nor_rich_nor_a_plot_library_without_need(config: Path) -> None:
    code = (
        "import sys; from llminfer.cli.app import run\n"
        f"assert run(['kv-size', {str(config)!r}, 'gpt2', '-N', '8k', '--runtime', 'all', '--format', 'json']) == 0\n"
        "names = {'torch', 'transformers', 'numpy', 'rich', 'plotext', 'matplotlib', 'huggingface_hub', 'gguf'}\n"
        "print(sorted(names & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-4b", "lfm2-1.2b"])
def test_verify_agrees_layer_by_layer(run_cli: Cli, name: str) -> None:
    code, out, _ = run_cli("kv-size", name, "-N", 1200, "--verify", "--format", "json")
    (result,) = results(out)
    assert code == 0
    assert [row["tokens"] for row in result["verified"]] == [1200, 1201, 1202]
    assert all(row["agrees"] for row in result["verified"])
    assert sum(result["verified"][0]["measured_layer_bytes"]) == result["total_bytes"]
    text = run_cli("kv-size", name, "-N", 1200, "--verify")[1].decode()
    assert "measured" in text
    assert "≠" not in text


@pytest.mark.parametrize("model_type", ["xlm", "xlnet"])
def test_verify_runs_with_values_what_does_not_run_without(run_cli: Cli, tmp_path: Path, model_type: str) -> None:
    from tests.tiny_models import tiny_config

    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config(model_type).to_dict(), default=str))
    code, out, err = run_cli("kv-size", file, "-N", 100, "--verify", "--format", "json")
    (result,) = results(out)
    assert code == 0
    assert "checked in a real run of 64 tokens" in err
    assert [row["tokens"] for row in result["verified"]] == [64, 65, 66]
    assert all(row["agrees"] and row["real_run"] for row in result["verified"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder model"),
        ({"model_type": "bert", "num_hidden_layers": 2}, "bert is an encoder, which does not continue a text"),
    ],
)
def test_what_continues_no_text_is_refused_within_two_lines(
    run_cli: Cli, tmp_path: Path, config: dict[str, object], said: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    code, out, err = run_cli("kv-size", file, "-N", 8)
    assert (code, out) == (4, b"")
    assert said in err
    assert len(err.splitlines()) <= 2


def test_musicgen_says_which_cache_is_meant(run_cli: Cli, tmp_path: Path) -> None:
    from tests.tiny_models import tiny_config

    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config("musicgen").to_dict(), default=str))
    assert (
        "the self-attention of the decoder alone" in run_cli("kv-size", file, "-N", 8, "--format", "plain")[1].decode()
    )


def test_verify_needs_a_config(run_cli: Cli) -> None:
    code, out, err = run_cli("kv-size", "--layers", 1, "--kv-heads", 1, "--head-dim", 8, "-N", 8, "--verify")
    assert (code, out) == (2, b"")
    assert "--verify needs a config" in err
