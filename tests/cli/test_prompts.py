"""Files of prompts and results as people have them: any Unicode, gaps, pipes, other models, missing folders."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llminfer.cli.prompts import _tidy
from tests.tiny_checkpoints import byte_level_tokenizer, save_tiny_checkpoint

Cli = Callable[..., tuple[int, bytes, str]]
HUGE = "9" * 400


def records(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.split(b"\n") if line]


def run(run_cli: Cli, model: Path, file: Path, *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    code, out, err = run_cli("generate", "-m", model, "--raw", "--prompts", file, "-n", 2, "-t", 0, *arguments)
    output = arguments[arguments.index("-o") + 1] if "-o" in arguments else None
    return code, records(Path(str(output)).read_bytes() if output and Path(str(output)).is_file() else out), err


# Lines of any content


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_no_character_of_a_text_or_an_id_ends_a_line(
    run_cli: Cli, scripted: Callable[..., Path], tmp_path: Path, mark: str
) -> None:
    model, file, output = scripted([f"a{mark}b", 1]), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"row{mark}{number}", "prompt": "x"} for number in (1, 2, 3)]
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    code, found, err = run(run_cli, model, file, "-o", output, "-q")
    assert (code, err) == (0, "")
    assert [(record["id"], record["text"]) for record in found] == [(line["id"], f"a{mark}b") for line in lines]
    # a gap, out of order
    kept = output.read_bytes().split(b"\n")
    output.write_bytes(kept[2] + b"\n" + kept[0] + b"\n")
    code, found, _ = run(run_cli, model, file, "-o", output, "-q", "--resume")
    assert (code, [record["line"] for record in found]) == (0, [1, 2, 3])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "cut \\ud83d"}', "not Unicode"),
        ('{"prompt": "x", "id": "\\ud83d"}', "not Unicode"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "not Unicode"),
        ('{"prompt": "x", "\\ud83d": 1}', "not Unicode"),
        (f'{{"prompt": "x", "max_new_tokens": {HUGE}}}', "an integer of 400 digits"),
        (f'{{"prompt": "x", "top_k": {HUGE}}}', "an integer of 400 digits"),
        (f'{{"prompt": "x", "temperature": {HUGE}}}', "an integer of 400 digits"),
        (f'{{"prompt": "x", "seed": {HUGE * 20}}}', "digits"),
        ('{"prompt": "x", "top_k": 2.5}', "top_k must be a whole number of at least 0, not 2.5"),
        ('{"prompt": "x", "seed": true}', "seed must be a whole number"),
        ('{"prompt": "x", "max_new_tokens": 1.5}', "max_new_tokens must be a whole number of at least 0, not 1.5"),
        (f'{{"prompt": "x", "logit_bias": {{"{HUGE}": 1}}}}', "the id of a logit_bias must be"),
        ('{"prompt": "x", "logit_bias": {"3": "much"}}', "logit_bias must be"),
        ('{"prompt": "x", "logit_bias": {"100000": 1}}', "100000"),
        ("[" * 100_000, "nested more than 64 deep"),
    ],
)
def test_a_line_that_cannot_run_has_an_error_and_the_others_run(
    run_cli: Cli, tiny_llama: Path, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"prompt": "one"}}\n{line}\n{{"prompt": "three"}}\n')
    code, found, err = run(run_cli, tiny_llama, file, "-q")
    assert (code, [record["line"] for record in found]) == (1, [1, 2, 3])
    assert ["error" in record for record in found] == [False, True, False]
    assert said in found[1]["error"]["message"]
    assert err.startswith("error: line 2: ")
    assert "line 2: line 2" not in err


@pytest.mark.parametrize("option", ["-n", "--top-k", "--seed", "--min-new-tokens", "--batch-size", "-t"])
def test_a_number_of_400_digits_is_a_usage_error(run_cli: Cli, tmp_path: Path, option: str) -> None:
    (tmp_path / "in.txt").write_text("x\n")
    code, _, err = run_cli("generate", "-m", "/no/such/model", "--prompts", tmp_path / "in.txt", option, HUGE)
    assert code == 2
    assert "must be a" in err
    assert HUGE not in err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(
    run_cli: Cli, tiny_llama: Path, tmp_path: Path, encoding: str, suffix: str
) -> None:
    file = tmp_path / f"in.{suffix}"
    line = '{"prompt": "a\u00e9"}' if suffix == "jsonl" else "a\u00e9"
    file.write_bytes(f"{line}\r\n{line}\n".encode(encoding))
    code, found, _ = run(run_cli, tiny_llama, file)
    assert code == 0
    assert [record["prompt_tokens"] for record in found] == [1 + 3, 1 + 3]  # BOS, and the bytes in UTF-8


def test_lines_end_with_lf_or_cr_lf_and_a_lone_cr_stays(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"ab\r\na\rb\nab\r\r\n\r\nab\r")
    _, found, _ = run(run_cli, tiny_llama, file)
    assert [(record["line"], record["prompt_tokens"]) for record in found] == [(1, 3), (2, 4), (3, 4), (5, 4)]


@pytest.mark.parametrize("suffix", ["", "\n", "\r\n", "\r"])
def test_a_prompt_file_and_standard_input_follow_the_same_rule(
    run_cli: Cli, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    data = b"\xef\xbb\xbfab" + suffix.encode()
    (tmp_path / "prompt.txt").write_bytes(data)
    for arguments, stdin in (("--prompt-file", tmp_path / "prompt.txt"), b""), (("-",), data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code, out, _ = run_cli("generate", "-m", tiny_llama, "--raw", "--json", "-n", "1", *arguments)
        assert code == 0
        assert len(json.loads(out)["prompt_token_ids"]) == 1 + 2 + (suffix == "\r")


# Where prompts come from and results go


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are for POSIX")
def test_prompts_may_come_from_a_pipe(tiny_llama: Path) -> None:
    command = f'"{sys.executable}" -m llminfer generate -m "{tiny_llama}" -n 1 --prompts <(printf "a\\nb\\n")'
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=300, check=True)
    assert [record["line"] for record in records(done.stdout)] == [1, 2]


@pytest.mark.parametrize("place", ["missing/out.jsonl", ".", "file/out.jsonl", "kept/out.jsonl", "locked.jsonl"])
@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_an_output_that_cannot_be_written_is_refused_at_once(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, option: str
) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "kept").mkdir()
    (tmp_path / "locked.jsonl").write_text("")
    locked = {tmp_path / "kept", tmp_path / "locked.jsonl"}
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or Path(path) not in locked)
    if option == "--plot":
        (tmp_path / "locked.svg").write_text("")
        locked.add(tmp_path / "locked.svg")
        target = tmp_path / (place.replace(".jsonl", ".svg") if place != "." else "folder.svg")
        (tmp_path / "folder.svg").mkdir()
        code, _, err = run_cli("kv-size", "llama-3.1-8b", "--plot", target)
    else:
        arguments = ("--prompts", tmp_path / "in.txt", "--resume", option, tmp_path / place)
        code, _, err = run_cli("generate", "-m", "/no/such/model", *arguments)
    assert code == 2
    assert err.startswith(f"error: {option} {tmp_path}")
    assert "hint: " in err


def test_a_folder_of_prompts_is_named(run_cli: Cli, tmp_path: Path) -> None:
    code, _, err = run_cli("generate", "-m", "/no/such/model", "--prompts", tmp_path)
    assert code == 2
    assert "Is a directory" in err


# What a result file belongs to


@pytest.fixture
def begun(run_cli: Cli, tiny_llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A file of three prompts, and the results of the first and third."""
    file, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    file.write_text("one\ntwo\nthree\n")
    assert run(run_cli, tiny_llama, file, "-o", output, "-q")[0] == 0
    lines = output.read_bytes().split(b"\n")
    output.write_bytes(lines[0] + b"\n" + lines[2] + b"\n")
    return file, output


@pytest.mark.parametrize(
    "options",
    [
        ("-n", 3),
        ("-t", 1),
        ("--top-k", 0),
        ("--seed", 0),
        ("--stop", "x"),
        ("--bad-words", "x"),
        ("--logit-bias", "3=1"),
        ("--ignore-eos",),
        ("--max-time", 100),
        ("--dtype", "float32"),
        ("--weights", "int8"),
    ],
)
def test_results_of_other_options_are_not_gone_on_with(
    run_cli: Cli, begun: tuple[Path, Path], options: tuple[object, ...]
) -> None:
    file, output = begun
    before = output.read_bytes()
    # no model is there: it is refused before one is looked for
    code, _, err = run(run_cli, Path("/no/such/model"), file, "-o", output, "--resume", *options)
    assert code == 2
    assert err.startswith(f"error: {output} was made with other options (line 1)\nhint: ")
    assert output.read_bytes() == before


def test_results_of_another_model_are_not_gone_on_with(
    run_cli: Cli, begun: tuple[Path, Path], tiny_llama: Path, tmp_path: Path
) -> None:
    file, output = begun
    before = output.read_bytes()
    other = save_tiny_checkpoint(tmp_path / "other", tokenizer=byte_level_tokenizer(["more"]))
    code, _, err = run(run_cli, other, file, "-o", output, "--resume")
    assert code == 2
    assert err.startswith(f"error: {output} was made with {tiny_llama.name}, not with other (line 1)")
    # another one of that name
    same = save_tiny_checkpoint(tmp_path / tiny_llama.name, tokenizer=byte_level_tokenizer(["more"]))
    code, _, err = run(run_cli, same, file, "-o", output, "--resume")
    assert code == 2
    assert f"was made with other weights or files of {tiny_llama.name}" in err
    assert output.read_bytes() == before


def test_results_that_do_not_say_what_made_them_get_a_note(
    run_cli: Cli, begun: tuple[Path, Path], tiny_llama: Path
) -> None:
    file, output = begun
    old = [{name: value for name, value in record.items() if name not in ("settings", "model_digest")}
           for record in records(output.read_bytes())]  # fmt: skip
    output.write_text("".join(json.dumps(record) + "\n" for record in old))
    code, found, err = run(run_cli, tiny_llama, file, "-o", output, "--resume")
    assert (code, [record["line"] for record in found]) == (0, [1, 2, 3])
    assert err.startswith(f"note: {output} does not say")


def test_a_gap_is_filled_in_the_order_of_the_input_by_whichever_run_ends_it(
    run_cli: Cli, begun: tuple[Path, Path], tiny_llama: Path
) -> None:
    file, output = begun
    first, third = output.read_bytes().split(b"\n")[:2]
    _, found, _ = run(run_cli, tiny_llama, file, "-o", output, "--resume")
    second = output.read_bytes().split(b"\n")[1]
    # a run that was killed before it could sort: complete, and out of order
    output.write_bytes(b"\n".join([second, third, first, b""]))
    code, found, err = run(run_cli, tiny_llama, file, "-o", output, "--resume")
    assert (code, [record["line"] for record in found]) == (0, [1, 2, 3])
    assert "nothing to do" in err
    assert output.read_bytes() == b"\n".join([first, second, third, b""])


def test_a_record_is_kept_to_the_byte(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    lines = [b'{"line": 2,  "x": "\\ud83d", "f": 1.50}\n', b'{"line": 1, "x": "\xe2\x80\xa8"}\n']
    output.write_bytes(lines[0] + lines[1] + b'{"line": 3, "cut": "')
    assert list(_tidy(output)) == [2, 1]
    assert output.read_bytes() == lines[1] + lines[0]
    for line in (b"{}\n", b'{"line": 1e999}\n', b"[1]\n"):
        output.write_bytes(line)
        with pytest.raises(Exception, match="is not a result of --prompts"):
            _tidy(output)


# What cannot be combined


@pytest.mark.parametrize("several", [("--prompts", "in.txt"), ("x", "--num-samples", "2")])
@pytest.mark.parametrize(
    "options",
    [
        ("--engine", "native"),
        ("--engine", "native", "--cache", "dynamic"),
        ("--compile",),
        ("--cache", "growing"),
        ("--cache", "static"),
        ("--cache", "quantized"),
        ("--cache", "quantized", "--kv-bits", "8"),
        ("--cache", "none"),
        ("--kv-bits", "8"),
        ("--kv-window", "32"),
        ("--prefill-chunk", "4"),
        ("--prompt-cache", "cache.safetensors"),
        ("--speculate", "prompt-lookup"),
        ("--draft", "other"),
    ],
)
def test_what_is_for_a_single_run_is_refused_before_loading(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: tuple[str, ...], options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a\n")
    code, _, err = run_cli("generate", "-m", "/no/such/model", *several, *options)
    assert code == 2
    assert err.startswith("error: --")
    if options != ("--kv-bits", "8"):
        assert "cannot be combined" in err


@pytest.mark.parametrize("option", ["--echo", "--print-token-ids", "--steps"])
def test_what_shows_a_single_run_cannot_be_combined_with_prompts(run_cli: Cli, tmp_path: Path, option: str) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    code, _, err = run_cli("generate", "-m", "/no/such/model", "--prompts", tmp_path / "in.txt", option)
    assert (code, err.splitlines()[0]) == (2, f"error: --prompts and {option} cannot be combined")


@pytest.mark.parametrize("weights", ["float32", "float16", "int8", "int4"])
def test_packed_weights_give_each_line_the_tokens_it_gets_alone(
    run_cli: Cli, tmp_path: Path, tiny_llama: Path, weights: str
) -> None:
    file = tmp_path / "in.txt"
    file.write_text("one\na longer one\nthree\n")
    options = ("-m", tiny_llama, "--raw", "-n", 5, "--seed", 4, "--weights", weights)
    code, out, err = run_cli("generate", *options, "--prompts", file)
    assert (code, err) == (0, "")
    for record, text in zip(records(out), file.read_text().split("\n"), strict=False):
        alone = json.loads(run_cli("generate", text, *options, "--json")[1])
        assert record["token_ids"] == alone["token_ids"]


def test_an_output_may_be_a_pipe(run_cli: Cli, scripted: Callable[..., Path], tmp_path: Path) -> None:
    source, pipe, came = tmp_path / "in.txt", tmp_path / "pipe", []
    source.write_text("x\n")
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: came.append(pipe.read_text()))
    reader.start()
    code, _, err = run_cli("generate", "--prompts", source, "-o", pipe, "--raw", "-q", "-m", scripted(["a", 1]))
    reader.join(timeout=60)
    assert (code, err) == (0, "")
    assert json.loads(came[0])["text"] == "a"
    code, _, err = run_cli("generate", "--prompts", source, "-o", pipe, "--resume", "-m", scripted(["a", 1]))
    assert code == 2
    assert "not a file" in err
