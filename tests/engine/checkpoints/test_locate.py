"""What `--model` names: paths never become Hub ids, and every refusal of the Hub has a sentence of its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from huggingface_hub import constants

from llminfer.engine.checkpoints.locate import ModelReference, find_reference
from llminfer.errors import LlminferError, ModelNotAvailable, UsageError
from llminfer.hub import fetch_checkpoint
from tests.conftest import ROOT
from tests.fake_hub import MODEL, FakeHub, fake_hub

RunCli = Callable[..., tuple[int, bytes, str]]
TOKEN = "secret123"


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a socket fails the test."""

    def refuse(*arguments: object, **options: object) -> NoReturn:
        pytest.fail(f"opened a socket: {arguments} {options}")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


# Paths


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what someone may name by mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    # online, so that only the guard keeps us from asking
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "models").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-config").mkdir()
    (tmp_path / "no-config" / "model.safetensors").write_bytes(b"")
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.usefixtures("no_sockets", "place")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("./modles/tiny", "no such file or folder: ./modles/tiny"),
        ("../tiny", "no such file or folder: ../tiny"),
        (".", "no such file: config.json"),
        ("/no/such", "no such file or folder: /no/such"),
        ("~/tiny", "no such file or folder: ~/tiny"),
        ("~nobody/tiny", "no such file or folder: ~nobody/tiny"),
        ("models/tiny", "no such file or folder: models/tiny"),
        ("models/", "no such file: models/config.json"),
        ("modles/tiny/", "no such file or folder: modles/tiny/"),
        ("modles/tiny/deep", "no such file or folder: modles/tiny/deep"),
        ("file.txt", "file.txt is not a model"),
        ("gone.txt", "no such file or folder: gone.txt"),
        ("model.gguf", "no such file or folder: model.gguf"),
        ("org/MODEL.GGUF", "no such file or folder: org/MODEL.GGUF"),
        ("model.safetensors", "no such file or folder: model.safetensors"),
        ("link", "link is not a model"),
        ("pipe", "pipe is not a model"),
        ("empty", "no such file: empty/config.json"),
        ("no-config", "no such file: no-config/config.json: the folder holds weights without a config.json"),
        (r"C:\models\tiny", r"no such file or folder: C:\models\tiny"),
        ("C:/models", "no such file or folder: C:/models"),
        (r"models\tiny", r"no such file or folder: models\tiny"),
        ("a b/c", "no such file or folder: a b/c"),
        ("[red]x", "no such file or folder: [red]x"),
        ("x" * 5000, f"{'x' * 5000} is neither a folder here nor a Hub id"),
        ("x/" * 5000, f"no such file or folder: {'x/' * 5000}"),
        ("a\0b", r"no such file or folder: a\x00b"),
    ],
)
def test_a_path_is_never_looked_up_on_the_hub(run_cli: RunCli, name: str, reason: str) -> None:
    code, out, err = run_cli("generate", "hi", "-m", name)
    assert (code, out) == (3, b"")
    assert err.splitlines()[0] == f"error: {reason}"


@pytest.mark.usefixtures("no_sockets", "place")
@pytest.mark.parametrize(
    ("files", "what", "hint"),
    [
        (["adapter_config.json"], "holds an adapter for example/base", "merge it into its base model"),
        (["model_index.json"], "holds a diffusion pipeline", "take a model that writes text"),
        (["snapshots/0a/config.json"], "is a folder of the Hub's cache", "snapshots/0a"),
        (["checkpoint-500/config.json"], "holds checkpoints of a training", "checkpoint-500"),
        (["b.gguf", "a.gguf"], "holds GGUF files", "a.gguf"),
        (["params.json", "consolidated.00.pth"], "in its maker's own format", "Hugging Face version"),
        (["model.onnx"], "holds an ONNX model", "GGUF file"),
        (["tiny/config.json"], "holds other models", "given/tiny"),
        (["model.safetensors", "tokenizer.json"], "holds weights without a config.json", "incomplete"),
        (["tokenizer.json"], "holds a tokenizer alone", "--tokenizer"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "hi", "-m"), ("kv-size",)], ids=["generate", "kv-size"])
def test_a_folder_that_is_no_model_is_called_what_it_is(
    run_cli: RunCli, place: Path, command: tuple[str, ...], files: list[str], what: str, hint: str
) -> None:
    for name in files:
        (place / "given" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "given" / name).write_text('{"base_model_name_or_path": "example/base"}')
    code, out, err = run_cli(*command, "given")
    assert (code, out) == (3, b"")
    assert what in err.splitlines()[0]
    assert hint in err.splitlines()[1]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"weight_map": {"a": "b"}}, "an index of weights"),
        ({"peft_type": "LORA"}, "the config of an adapter"),
        ({"model": {}, "added_tokens": []}, "a tokenizer"),
        ({"tokenizer_class": "X"}, "the config of a tokenizer"),
        ({"eos_token_id": 1, "transformers_version": "5"}, "a generation config"),
    ],
)
def test_a_json_file_that_is_no_config_is_called_what_it_is(
    run_cli: RunCli, place: Path, content: dict[str, object], what: str
) -> None:
    (place / "given.json").write_text(json.dumps(content))
    code, out, err = run_cli("kv-size", "given.json", "-N", 1)
    assert (code, out) == (3, b"")
    assert f"given.json is {what}, not of a model" in err


def test_a_file_of_a_model_is_no_model(run_cli: RunCli, place: Path) -> None:
    (place / "no-config" / "config.json").write_text("{}")
    for name in ("no-config/model.safetensors", "no-config/config.json"):
        code, out, err = run_cli("generate", "hi", "-m", name)
        assert (code, out) == (3, b"")
        assert f"{name} is a file of a model, not the model\nhint: give its folder, no-config\n" in err


def test_a_gguf_file_by_its_content(place: Path) -> None:
    (place / "sha256-0a").write_bytes(b"GGUF")
    assert find_reference("sha256-0a").kind == "gguf"


def test_an_empty_name_is_not_the_current_folder(run_cli: RunCli) -> None:
    code, out, err = run_cli("generate", "hi", "-m", "")
    assert (code, out) == (2, b"")
    assert err.startswith("error: the model's name is empty\n")


@pytest.mark.usefixtures("no_sockets", "place")
def test_a_revision_of_a_path_is_a_usage_error(run_cli: RunCli, tiny_llama: Path) -> None:
    code, out, err = run_cli("generate", "hi", "-m", tiny_llama, "--revision", "main")
    assert (code, out) == (2, b"")
    assert "--revision is for Hub models" in err


@pytest.mark.parametrize("name", ["gpt2", "org/tiny", "org/tiny-0.5B_v1.1"])
def test_what_may_be_a_hub_id(name: str, place: Path) -> None:
    assert find_reference(name, revision="v1") == ModelReference(kind="hub", name=name, revision="v1")


def test_a_folder_comes_before_a_hub_id(place: Path) -> None:
    (place / "org" / "tiny").mkdir(parents=True)
    assert find_reference("org/tiny").kind == "folder"
    assert find_reference("~/org/tiny").path == place / "org" / "tiny"


def test_a_gguf_file_by_its_name_in_any_case(place: Path) -> None:
    (place / "Model.GGUF").write_bytes(b"")
    assert find_reference("Model.GGUF").kind == "gguf"


def test_a_name_that_the_hub_cannot_have_is_no_traceback() -> None:
    with pytest.raises(ModelNotAvailable, match="neither a folder here nor a Hub id"):
        fetch_checkpoint("a--b..c")


def test_empty_names_are_refused_by_the_library() -> None:
    with pytest.raises(UsageError):
        find_reference("")


# The Hub


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """What the fake Hub serves: the tiny Llama, and files that nobody needs."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("hub") / "tiny"))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "custom.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("read me")
    return folder


@pytest.fixture
def hub(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake Hub that this process asks in place of the real one, with a token and an empty cache."""
    with fake_hub(served) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("org/private", "org/private is not a folder here, and not found on the Hub without a login", "hf auth login"),
        ("org/no-login", "the Hub wants a valid login to show org/no-login", "log in with `hf auth login`"),
        ("org/bad-login", "the Hub wants a valid login to show org/bad-login", "HF_TOKEN may have expired"),
        ("org/gated", "org/gated is gated on the Hub", "accept its licence at {url}/org/gated and log in"),
        ("org/gated-logged-out", "org/gated-logged-out is gated on the Hub", "accept its licence at {url}/org/gated"),
        ("org/forbidden", "the Hub refuses access to org/forbidden", "token"),
        ("org/missing", "org/missing is not a folder here, and not found on the Hub", "check the spelling"),
        ("org/disabled", "org/disabled is disabled on the Hub", "its page may say why: {url}/org/disabled"),
        ("org/broken", "the Hub failed to serve org/broken (HTTP status 501)", "try again later"),
    ],
)
def test_every_refusal_has_its_sentence(run_cli: RunCli, hub: FakeHub, name: str, reason: str, hint: str) -> None:
    code, out, err = run_cli("generate", "hello prompt", "-m", name)
    assert (code, out) == (3, b"")
    lines = err.splitlines()
    assert lines[0] == f"error: {reason}"
    assert lines[1].startswith("hint: ")
    assert hint.format(url=hub.url) in lines[1]
    assert len(lines) == 2
    assert TOKEN not in err
    assert "hello prompt" not in err


def test_refusals_as_json(run_cli: RunCli, hub: FakeHub) -> None:
    code, out, err = run_cli("generate", "hi", "-m", "org/gated", "--json")
    error = json.loads(out)["error"]
    assert (code, error["exit_code"], error["message"]) == (3, 3, "org/gated is gated on the Hub")
    assert TOKEN not in out.decode() + err


def test_a_revision_that_is_not_there(run_cli: RunCli, hub: FakeHub) -> None:
    code, out, err = run_cli("generate", "hi", "-m", MODEL, "--revision", "v9")
    assert (code, out, err) == (3, b"", "error: org/tiny has no revision v9 on the Hub\n")


def test_a_licence_that_only_the_files_ask_for(run_cli: RunCli, hub: FakeHub) -> None:
    hub.refused_files["model.safetensors"] = (403, {"X-Error-Code": "GatedRepo"})
    code, out, err = run_cli("generate", "hi", "-m", MODEL)
    assert (code, out) == (3, b"")
    assert err.startswith("error: org/tiny is gated on the Hub\n")


def test_a_model_is_fetched_once_and_only_the_files_that_it_needs(
    run_cli: RunCli, hub: FakeHub, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("-n", "5", "--temperature", "0", "-q")
    expected = run_cli("generate", "a", "-m", tiny_llama, *options)
    assert run_cli("generate", "a", "-m", MODEL, *options) == expected
    fetched = {request.rsplit("/", 1)[1] for request in hub.requests if request.startswith("GET /org/tiny/resolve")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= fetched
    assert not fetched & {"pytorch_model.bin", "custom.py", "README.md"}
    hub.requests.clear()
    assert run_cli("generate", "a", "-m", MODEL, *options) == expected
    assert not [request for request in hub.requests if request.startswith("GET /org/tiny/resolve")]
    # offline the cache alone answers
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert run_cli("generate", "a", "-m", MODEL, *options) == expected
    assert hub.requests == []


def test_pickles_and_code_come_only_when_they_are_wanted(hub: FakeHub) -> None:
    folder = fetch_checkpoint(MODEL, allow_pickle=True, code=True)
    assert (folder / "pytorch_model.bin").is_file()
    assert (folder / "custom.py").is_file()


def test_what_the_cache_holds_in_part_is_told_apart(
    hub: FakeHub, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_checkpoint(MODEL)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run_cli("generate", "hi", "-m", MODEL)
    assert (code, out) == (3, b"")
    assert f"org/tiny is in the Hub's cache ({constants.HF_HUB_CACHE}) only in part" in err


@pytest.mark.usefixtures("no_sockets")
def test_offline_and_not_in_the_cache(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    code, out, err = run_cli("generate", "hi", "-m", "org/nowhere")
    assert (code, out) == (3, b"")
    assert err.splitlines() == [
        f"error: org/nowhere is not a folder here, not in the Hub's cache ({tmp_path}), and offline mode is on",
        "hint: unset HF_HUB_OFFLINE to download it",
    ]


def test_no_network_is_told_at_once(run_cli: RunCli, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", nobody)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{nobody}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        code, out, err = run_cli("generate", "hi", "-m", "org/nowhere")
    assert (code, out) == (3, b"")
    assert "org/nowhere is not a folder here, not in the Hub's cache" in err
    assert "and the Hub cannot be reached" in err


def test_a_full_disk_is_not_blamed_on_the_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(LlminferError, match=r"cannot write to the Hub's cache .*: No space left on device") as caught:
        fetch_checkpoint(MODEL)
    assert caught.value.exit_code == 1


@pytest.mark.timeout(120)
def test_from_the_hub_and_then_offline_by_the_environment_alone(served: Path, tmp_path: Path) -> None:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return subprocess.run(
            [sys.executable, "-m", "llminfer", "generate", "a", *arguments],
            capture_output=True,
            env={**clean, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            check=False,
        )

    options = ("-m", MODEL, "-n", "5", "--temperature", "0")
    with fake_hub(served) as hub:
        first = run(*options, HF_ENDPOINT=hub.url)
        assert first.returncode == 0, first.stderr
        assert hub.requests
        hub.requests.clear()
        second = run(*options, "-q", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
        assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, b"")
        assert hub.requests == []
    lines = first.stderr.decode().splitlines()
    assert lines[0].startswith("org/tiny · cpu · ")
    assert TOKEN not in first.stderr.decode()
