"""What a MODEL argument becomes, with a Hub that answers from the test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from llminfer.errors import ModelNotAvailable
from llminfer.hub import looks_like_path
from llminfer.sources import find_source, shipped_configs


def refusal(kind: type[Exception], status: int) -> Exception:
    """An error as the Hub client raises it, without the HTTP library that it happens to use."""
    return kind("x", response=SimpleNamespace(headers={}, request=None, status_code=status))


def test_only_the_config_of_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    asked = []

    def fetch(*arguments: str, **_: object) -> str:
        asked.append(arguments)
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    source = find_source("owner/name")
    assert source.config == {"model_type": "llama"}
    assert (source.path, source.gguf) == (None, None)
    assert asked == [("owner/name", "config.json")]


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (refusal(errors.GatedRepoError, 403), "owner/name is gated on the Hub", "accept its licence at https://"),
        (refusal(errors.RepositoryNotFoundError, 404), "not found on the Hub", "log in"),
        (refusal(errors.RemoteEntryNotFoundError, 404), "has no config.json", None),
        (errors.LocalEntryNotFoundError("x"), "not in the Hub's cache", "HF_HUB_OFFLINE"),
        (refusal(errors.HfHubHTTPError, 500), "failed to serve", None),
        (ConnectionError("secret123"), "not in the Hub's cache", None),
    ],
)
def test_each_refusal_of_the_hub_has_its_own_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, hint: str | None
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelNotAvailable) as caught:
        find_source("owner/name")
    assert message in caught.value.message
    assert "secret123" not in caught.value.message
    if hint is not None:
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("argument", "is_path"),
    [
        ("./a", True),
        ("/a/b", True),
        ("~/a", True),
        ("C:\\a", True),
        ("a.json", True),
        ("a/b.gguf", True),
        ("a/b/c", True),
        ("a/", True),
        ("owner/name", False),
        ("gpt2", False),
        ("owner/name-v0.1", False),
    ],
)
def test_what_looks_like_a_path(argument: str, is_path: bool) -> None:
    assert looks_like_path(argument) is is_path


def test_a_folder_comes_before_a_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "gpt2" in shipped_configs()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    assert find_source("gpt2").config == {}


@pytest.mark.parametrize("argument", ["a\0b", "x" * 5000, "/" + "y" * 5000])
def test_names_that_no_file_can_have(argument: str) -> None:
    with pytest.raises(ModelNotAvailable):
        find_source(argument)
