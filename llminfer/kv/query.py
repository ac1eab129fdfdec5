"""What `kv-size` is asked of each model (setups × lengths, what fits, a check, a drawing), and its answers in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llminfer.errors import UnsupportedArchitecture, UsageError
from llminfer.kv.budget import Memory, budget
from llminfer.kv.footprint import footprint, total_bytes
from llminfer.kv.layer import ModelKV
from llminfer.kv.results import Answer, CheckRow, Curve
from llminfer.kv.runtimes.records import Moment
from llminfer.kv.setup import CacheSetup
from llminfer.kv.tensor_parallel import shard
from llminfer.kv.weights import weights_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every model: each setup at each length.

    `tokens` is None when no length was stated. `keep_refusals` makes the reason why a runtime
    cannot hold a model an answer, too.
    """

    setups: tuple[CacheSetup, ...]
    tokens: tuple[int, ...] | None = None
    keep_refusals: bool = False


class Measured(Protocol):
    """One moment of a real cache."""

    @property
    def tokens(self) -> int: ...
    @property
    def layer_bytes(self) -> tuple[int, ...]: ...
    @property
    def storage_bytes(self) -> int: ...
    @property
    def real(self) -> bool: ...


def memory_of(
    path: Path | None,
    *,
    name: str,
    total_bytes: int,
    config: Mapping[str, Any] | None = None,
    weights: int | None = 0,
    reserve_bytes: int = 0,
    ranks: int = 1,
) -> Memory:
    """What a rank has for its cache.

    Args:
        path: where the model's weights are, if anywhere.
        name: what to call the model.
        config: the model's config, which may name the files of its weights.
        weights: their bytes; None for what the files hold.

    Raises:
        UsageError: when the files are asked and there are several ranks, which hold a share each.
        ModelNotAvailable: when they are asked and there are none.
    """
    if weights is None and ranks > 1:
        raise UsageError("--weights auto counts all weights, --memory is one rank's", hint="give a rank's share")
    held = weights_bytes(path, name=name, config=config) if weights is None else weights
    return Memory(total_bytes=total_bytes, weights_bytes=held, reserve_bytes=reserve_bytes)


def answers(model: ModelKV, question: Question, *, memory: Memory | None = None) -> list[Answer]:
    """One answer for each setup and length, in this order.

    Without a length the longest that fits into the memory is taken, and without a memory the
    model's own limit.

    Raises:
        UsageError: when the ranks do not divide the model, or it states no limit where that is needed.
        UnsupportedArchitecture: when a runtime cannot hold the model, unless refusals are kept.
    """
    for ranks in dict.fromkeys(setup.tp for setup in question.setups):
        shard(model, ranks=ranks, transformers_heads=False)  # ranks that cannot be are an error for every runtime
    lengths: Sequence[int | None] = question.tokens or (None,)
    if question.tokens is None and memory is None:
        if model.context_limit is None:
            raise UsageError(f"{model.name} states no context limit of its own", hint="give --tokens")
        lengths = (model.context_limit,)
    found = []
    for setup in question.setups:
        for tokens in lengths:
            try:
                found.append(_answer(model, setup, tokens=tokens, memory=memory))
            except (UnsupportedArchitecture, UsageError) as error:
                if not question.keep_refusals:
                    raise
                shown = tokens or model.context_limit or 1
                found.append(Answer(model=model, setup=setup, tokens=shown, refusal=error.message))
    return found


def _answer(model: ModelKV, setup: CacheSetup, *, tokens: int | None, memory: Memory | None) -> Answer:
    fits = None if memory is None else budget(model, memory, tokens=tokens, setup=setup)
    if tokens is None:
        # show what fits; a cache that never fills the memory is shown at the model's limit
        longest = fits.max_tokens if fits else None
        tokens = (model.context_limit or 1) if longest is None else max(longest, 1)
    sizes = footprint(model, tokens=tokens, setup=setup)
    return Answer(model=model, setup=setup, tokens=tokens, footprint=sizes, budget=fits)


def compare(model: ModelKV, moments: Sequence[Measured], *, setup: CacheSetup) -> tuple[CheckRow, ...]:
    """Prediction beside measurement, after a prefill and after each of the steps that follow it.

    A storage that differs from the tensors is a peak, of what came last: the prefill, or a step.
    """
    rows: list[CheckRow] = []
    starts = {tensor.after for layer in model.layers for tensor in layer.tensors}
    for measured in moments:
        if rows and any(moments[0].tokens <= start <= measured.tokens for start in starts):
            break  # what begins with the answer has other sizes, as the model's notes say
        predicted = footprint(model, tokens=measured.tokens, setup=setup)
        before = footprint(model, tokens=measured.tokens - 1, setup=setup) if rows else predicted
        moment = Moment.STEP if rows else Moment.PREFILL
        storage = next((peak.size_bytes for peak in before.peaks if peak.moment is moment), predicted.total_bytes)
        rows.append(
            CheckRow(
                tokens=measured.tokens,
                # the cache may have more layers than the model, which hold nothing
                predicted_bytes=predicted.layer_bytes + (0,) * (len(measured.layer_bytes) - len(predicted.layer_bytes)),
                measured_bytes=measured.layer_bytes,
                predicted_storage_bytes=storage,
                measured_storage_bytes=measured.storage_bytes,
                real=measured.real,
            )
        )
    return tuple(rows)


def notes(question: Question, found: Sequence[Answer]) -> list[str]:
    """What a reader of the numbers alone would miss."""
    limits, others = set(), set()
    for answer in found:
        model = answer.model
        if question.tokens is None and answer.footprint and answer.budget is None:
            limits.add(f"no --tokens: {model.name}'s own limit, {model.context_limit}")
        if answer.beyond_limit:
            others.add(f"{answer.tokens} tokens are more than {model.name}'s own limit of {model.context_limit}")
        if model.dtype_assumed and not answer.setup.states_dtype:
            others.add(f"{model.name} states no element type: counted as {model.dtype}; --dtype sets another")
    return [*sorted(limits), *sorted(others)]


def curves(found: Iterable[Answer]) -> list[Curve]:
    """Bytes against context, for each model and setup up to its longest answer."""
    longest: dict[tuple[str, CacheSetup], Answer] = {}
    for answer in found:
        key = (answer.model.name, answer.setup)
        if answer.footprint and (key not in longest or answer.tokens > longest[key].tokens):
            longest[key] = answer
    return [_curve(answer) for answer in longest.values()]


def _curve(answer: Answer) -> Curve:
    model, setup = answer.model, answer.setup
    size = total_bytes(model, setup)
    ranks = f", tp {setup.tp}" if setup.tp > 1 else ""
    batch = f", batch {setup.batch}" if setup.batch > 1 else ""
    return Curve(
        label=f"{model.name}, {setup.runtime}{batch}{ranks}",
        bytes_of=lambda tokens: size(tokens, setup.batch),
        last_tokens=answer.tokens,
        corners=tuple(sorted({layer.window for layer in model.layers if layer.window is not None})),
    )
