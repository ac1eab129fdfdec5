"""A tokenizer larger than the model: said once, before any forward, wherever a prompt comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig

from tests.tiny_checkpoints import byte_level_tokenizer, save_tiny_checkpoint

Cli = Callable[..., tuple[int, bytes, str]]
SIZE = len(byte_level_tokenizer())
SAID = f"the tokenizer is larger than the model: the prompt has id {SIZE} ('<tool>'), and the model embeds {SIZE} ids"


@pytest.fixture(scope="module")
def too_large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer was given a token that the model never learned."""
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("too-large"), config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("arguments", [(), ("--engine", "native"), ("--weights", "int8"), ("--num-samples", "2")])
def test_a_prompt_with_such_a_token_is_refused(run_cli: Cli, too_large: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = run_cli("generate", "use <tool> now", "-m", too_large, "-n", "1", *arguments)
    assert (code, out) == (3, b"")
    assert err.splitlines()[-2:] == [
        f"error: {SAID}",
        "hint: take the tokenizer that belongs to these weights, or a prompt without this token",
    ]


def test_in_a_batch_it_is_one_line_s_error(run_cli: Cli, too_large: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("use <tool> now\nhello\n")
    _, out, _ = run_cli("generate", "--prompts", tmp_path / "prompts.txt", "-m", too_large, "-n", "2")
    first, second = (json.loads(line) for line in out.splitlines())
    assert SAID in json.dumps(first["error"], ensure_ascii=False)
    assert len(second["token_ids"]) == 2


def test_words_that_cannot_come_are_harmless(run_cli: Cli, too_large: Path) -> None:
    run = ("generate", "hello", "-m", too_large, "-n", "4", "-t", "0", "--ignore-eos", "--quiet")
    code, plain, _ = run_cli(*run)
    assert code == 0
    for option in ("--bad-words", "--stop"):
        assert run_cli(*run, option, "<tool>") == (0, plain, "")
