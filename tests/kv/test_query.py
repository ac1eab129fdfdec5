"""What the library answers about caches, and that the command asks the same questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

import llminfer.api
from llminfer import kv_budget, kv_footprint, verify
from llminfer.api import kv_model
from llminfer.errors import InvalidParams, ModelNotAvailable, UnsupportedArchitecture, UsageError
from llminfer.kv.budget import Memory
from llminfer.kv.footprint import footprint, total_bytes
from llminfer.kv.query import Question, answers, curves, notes
from llminfer.kv.runtimes.table import RUNTIMES
from llminfer.kv.setup import CacheSetup, SetupOptions
from tests.kv.models import attention, model, recurrent

Cli = Callable[..., tuple[int, bytes, str]]
TINY = model(attention(2, 16), attention(2, 16, window=8), limit=50)


def test_answers_come_setup_by_setup_and_length_by_length() -> None:
    setups = tuple(CacheSetup(runtime=name, batch=batch) for name in ("transformers", "ideal") for batch in (1, 3))
    found = answers(TINY, Question(setups=setups, tokens=(5, 2)))
    assert [(answer.setup, answer.tokens) for answer in found] == [
        (setup, tokens) for setup in setups for tokens in (5, 2)
    ]
    for answer in found:
        assert answer.footprint == footprint(TINY, tokens=answer.tokens, setup=answer.setup)


def test_without_a_length_the_models_limit_or_what_fits() -> None:
    question = Question(setups=(CacheSetup(),))
    (answer,) = answers(TINY, question)
    assert answer.tokens == 50
    assert notes(question, [answer, answer]) == ["no --tokens: tiny's own limit, 50"]
    (answer,) = answers(TINY, question, memory=Memory(total_bytes=128 * (20 + 7)))
    assert answer.budget is not None
    assert (answer.tokens, answer.budget.exceeded, notes(question, [answer])) == (20, False, [])
    (answer,) = answers(TINY, question, memory=Memory(total_bytes=1))
    assert answer.budget is not None
    assert answer.budget.exceeded
    with pytest.raises(UsageError, match="no context limit"):
        answers(replace(TINY, context_limit=None), question)


def test_a_refusal_is_an_answer_only_where_wanted() -> None:
    question = Question(setups=tuple(CacheSetup(runtime=name) for name in RUNTIMES), tokens=(9,), keep_refusals=True)
    refused = [answer.setup.runtime for answer in answers(TINY, question) if answer.footprint is None]
    assert refused == ["transformers-quantized"]
    unstated = replace(question, tokens=None)
    fitting = answers(TINY, unstated, memory=Memory(total_bytes=10**6))
    assert not any("no --tokens" in note for note in notes(unstated, fitting))
    with pytest.raises(UnsupportedArchitecture, match="full attention"):
        answers(TINY, replace(question, keep_refusals=False))
    with pytest.raises(UsageError, match="does not divide"):
        answers(TINY, replace(question, setups=(CacheSetup(tp=3),)))


def test_a_curve_is_drawn_up_to_the_longest_answer_and_bends_at_windows() -> None:
    setup = CacheSetup(batch=2, tp=2)
    (curve,) = curves(answers(TINY, Question(setups=(setup,), tokens=(5, 40, 10))))
    assert (curve.label, curve.last_tokens, curve.corners) == ("tiny, transformers, batch 2, tp 2", 40, (8,))
    assert curve.bytes_of(30) == total_bytes(TINY, setup)(30, 2)


def test_options_are_the_fields_of_a_setup() -> None:
    assert [field.name for field in fields(CacheSetup)] == [*SetupOptions.__annotations__]
    setup = CacheSetup(batch=3, runtime="ideal")
    assert footprint(TINY, tokens=9, setup=setup, batch=1) == footprint(TINY, tokens=9, runtime="ideal")


@pytest.mark.parametrize("field", ["batch", "tp"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None])
def test_a_setup_is_checked_when_made(field: str, value: object) -> None:
    with pytest.raises(InvalidParams, match=field):
        CacheSetup(**{field: value})  # type: ignore[arg-type]


def test_the_library_and_the_command_give_the_same_budget(run_cli: Cli) -> None:
    asked = (
        "kv-size",
        "gemma-3-4b",
        "-N",
        8192,
        "-b",
        2,
        "--runtime",
        "vllm",
        "--memory",
        "24GiB",
        "--weights",
        "8GiB",
    )
    (result,) = json.loads(run_cli(*asked, "--format", "json")[1])["results"]
    found = kv_budget("gemma-3-4b", memory="24GiB", weights=8 * 2**30, tokens=8192, batch=2, runtime="vllm")
    assert {name: getattr(found, name) for name in ("fits", "needed_bytes", "max_tokens", "max_batch")}.items() <= (
        result["budget"].items()
    )
    sizes = kv_footprint("gemma-3-4b", tokens=8192, batch=2, runtime="vllm")
    assert (sizes.total_bytes, sizes.formula) == (result["total_bytes"], result["formula"])


def test_a_model_is_read_once_for_many_questions(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = kv_model(config)
    assert kv_model(known) is known
    for named in (config, known, tmp_path, str(tmp_path)):
        assert kv_footprint(named, tokens=3).total_bytes == 2 * 2 * 64 * 3 * 4
        assert kv_budget(named, memory=2 * 2 * 64 * 3 * 4).max_tokens == 3
    with pytest.raises(ModelNotAvailable, match="no weight files"):
        kv_budget(tmp_path, memory="1GiB", weights="auto")
    with pytest.raises(InvalidParams, match="not a size"):
        kv_budget(tmp_path, memory="a lot")


def test_verify_compares_with_the_real_classes() -> None:
    rows = verify("qwen3-0.6b", tokens=20, batch=2)
    assert [row.tokens for row in rows] == [20, 21, 22]
    assert all(row.agrees for row in rows)
    for no_config in (TINY, model(recurrent(8, 4, 2))):
        with pytest.raises(UsageError, match="needs a config"):
            verify(no_config, tokens=3)


def test_a_check_that_fails_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(kv_model("qwen3-0.6b"), layers=kv_model("qwen3-0.6b").layers[:-1])
    monkeypatch.setattr(llminfer.api, "kv_model", lambda named: wrong)
    assert not any(row.agrees for row in verify("qwen3-0.6b", tokens=5))
