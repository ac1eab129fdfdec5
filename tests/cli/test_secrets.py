"""Whatever fails: no token, no prompt and no traceback in what is printed, and nothing on standard output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

RunCli = Callable[..., tuple[int, bytes, str]]
TOKEN = "secret123"
PROMPT = "my private words"


@pytest.fixture(scope="module")
def models(tiny_llama: Path, scripted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models that fail, each in its own way."""
    place = tmp_path_factory.mktemp("models")

    def copy(name: str, **config: Any) -> Path:
        folder = Path(shutil.copytree(tiny_llama, place / name))
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, **config}))
        return folder

    copy("good")
    (copy("no-weights") / "model.safetensors").unlink()
    (copy("garbage") / "model.safetensors").write_bytes(b"garbage")
    (copy("no-tokenizer") / "tokenizer.json").unlink()
    copy("t5", model_type="t5")
    copy("code", model_type="custom", auto_map={"AutoModelForCausalLM": "custom.Model"})
    copy("short", max_position_embeddings=2)
    shutil.copytree(scripted(["a"], nan_after=0, positions=64), place / "nan")
    template = copy("template") / "chat_template.jinja"
    template.write_text("{{ raise_exception('no roles here') }}")
    (copy("broken-template") / "chat_template.jinja").write_text("{% if %}")
    (place / "model.gguf").write_bytes(b"GGUF garbage")
    return place


FAILURES: dict[str, tuple[int, Sequence[str]]] = {
    "no such folder": (3, ["generate", PROMPT, "-m", "./nowhere"]),
    "not in the cache": (3, ["generate", PROMPT, "-m", "org/nowhere"]),
    "no weights": (3, ["generate", PROMPT, "-m", "no-weights"]),
    "damaged weights": (3, ["generate", PROMPT, "-m", "garbage"]),
    "damaged GGUF file": (3, ["generate", PROMPT, "-m", "model.gguf", "-q"]),
    "no tokenizer": (3, ["generate", PROMPT, "-m", "no-tokenizer"]),
    "an encoder-decoder": (4, ["generate", PROMPT, "-m", "t5"]),
    "custom code": (3, ["generate", PROMPT, "-m", "code"]),
    "a template that refuses": (2, ["generate", PROMPT, "-m", "template"]),
    "a template with a fault": (2, ["generate", PROMPT, "-m", "broken-template"]),
    "longer than the context": (2, ["generate", PROMPT, "-m", "short"]),
    "NaN": (1, ["generate", PROMPT, "-m", "nan", "-q"]),
    "no such device": (3, ["generate", PROMPT, "-m", "good", "--device", "cuda:99"]),
    "no device at all": (2, ["generate", PROMPT, "-m", "good", "--device", "banana"]),
    "no dtype": (2, ["generate", PROMPT, "-m", "good", "--dtype", "banana"]),
    "out of range": (2, ["generate", PROMPT, "-m", "good", "--temperature", "nan"]),
    "no number": (2, ["generate", PROMPT, "-m", "good", "--seed", "x"]),
    "no such option": (2, ["generate", PROMPT, "-m", "good", "--banana"]),
    "an option without its value": (2, ["generate", PROMPT, "-m"]),
    "two prompts": (2, ["generate", PROMPT, "-m", "good", "--prompt-file", "prompt.txt"]),
    "a prompt without quotes": (2, ["generate", *PROMPT.split(), "-m", "good"]),
    "a prompt as the command": (2, [PROMPT]),
    "a prompt after an option": (2, ["generate", "-q", PROMPT, "private", "words"]),
}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, models: Path) -> Callable[..., str]:
    """Runs a failing command in the folder of models; its standard error."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(models)

    def run(*arguments: str, code: int) -> str:
        exit_code, out, err = run_cli(*arguments)
        assert exit_code == code, err
        assert TOKEN not in out.decode() + err
        for secret in (PROMPT, "private"):
            assert secret not in err
        assert "Traceback" not in err
        assert 'File "' not in err
        labels = [line.partition(":")[0] for line in err.splitlines()]
        assert labels in (["error"], ["error", "hint"])
        assert out == b"" or json.loads(out)["error"]["exit_code"] == code
        return err

    return run


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_says_what_it_must_and_no_more(check: Callable[..., str], failure: str) -> None:
    code, arguments = FAILURES[failure]
    check(*arguments, code=code)


@pytest.mark.parametrize("failure", [name for name, (code, _) in FAILURES.items() if code != 2])
def test_a_failure_as_json_is_one_document(run_cli: RunCli, check: Callable[..., str], failure: str) -> None:
    code, arguments = FAILURES[failure]
    check(*arguments, "--json", code=code)
    out = run_cli(*arguments, "--json")[1]
    assert out.count(b"\n") == 1
    error = json.loads(out)["error"]
    assert error["exit_code"] == code


def test_a_path_that_is_no_text_is_still_one_line_and_one_document(run_cli: RunCli) -> None:
    name = "/no/\udcff"
    code, out, err = run_cli("generate", "a", "-m", name, "--json")
    assert code == 3
    assert err.startswith(r"error: --model /no/\udcff: its name is not valid UTF-8")
    assert "/no/" in json.loads(out)["error"]["message"]


def test_an_unforeseen_error_is_one_line(check: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("division by zero\nand more lines")

    monkeypatch.setattr("llminfer.engine.prepare.encode_prompt", fail)
    err = check("generate", PROMPT, "-m", "good", code=1)
    assert err == "error: ZeroDivisionError: division by zero\nhint: this is a bug; --debug shows where\n"


def test_debug_alone_shows_a_traceback(run_cli: RunCli) -> None:
    with pytest.raises(Exception, match="no such file or folder"):
        run_cli("generate", "a", "-m", "/no/such", "--debug")
