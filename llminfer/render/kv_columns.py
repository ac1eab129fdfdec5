"""What the answers of `kv-size` consist of in every format: tables, the lines below them, the facts about each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Any, TypeAlias

from llminfer.kv.budget import Budget
from llminfer.kv.footprint import Footprint
from llminfer.kv.layer import LayerKV
from llminfer.kv.results import Answer, CheckRow
from llminfer.units import format_bytes, visible

NONE = "–"
_NOTHING = format_bytes(0)
_FITS = {None: NONE, True: "yes", False: "no"}
_FORMULAS_AT_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A heading, the text of one answer under it, and whether it is a number (so set to the right)."""

    heading: str
    show: Callable[[Answer], str]
    number: bool = True

    def text(self, answer: Answer) -> str:
        """The cell's text, whatever the name that stands in it."""
        return visible(self.show(answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Headings, rows of as many cells, and which columns are numbers.

    `shared` has how a column is said once where all rows have the same in it; `drop` names the columns
    that a narrow terminal can do without, the first of them first.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[bool]
    shared: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()

    def captioned(self) -> tuple[str, Table]:
        """What all rows share as one line, and the table without it."""
        columns = {heading: {row[at] for row in self.rows} for at, heading in enumerate(self.headings)}
        alike = {name: values.pop() for name, values in columns.items() if name in self.shared and len(values) == 1}
        kept = [at for at, heading in enumerate(self.headings) if heading not in alike]
        rest = Table(
            headings=[self.headings[at] for at in kept],
            rows=[[row[at] for at in kept] for row in self.rows],
            numbers=[self.numbers[at] for at in kept],
            drop=self.drop,
        )
        said = (self.shared[name].format(value) for name, value in alike.items() if value != _NOTHING)
        return " · ".join(said), rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Title:
    """What the tables that follow are about: a model's name, and the rest of the line."""

    model: str
    text: str


Block: TypeAlias = Table | Title | Sequence[str]


def blocks(answers: Sequence[Answer], *, layers: bool) -> Iterator[Block]:
    """The table of the answers and the lines below it; then layers and fields where wanted, and what was checked."""
    used = columns(answers)
    yield Table(
        headings=[column.heading for column in used],
        rows=[[column.text(answer) for column in used] for answer in answers],
        numbers=[column.number for column in used],
        shared=_SHARED,
        drop=_DROPPED,
    )
    yield lines_below(answers)
    for answer in answers:
        if layers and answer.footprint is not None:
            yield Title(model=visible(answer.model.name), text=f", {answer.setup.runtime}, {answer.tokens} tokens")
            yield Table(headings=_LAYER_HEADINGS, rows=layer_rows(answer.footprint), numbers=_LAYER_NUMBERS)
            yield Table(headings=("field", "value", "from"), rows=field_rows(answer), numbers=(False, False, False))
        if answer.check:
            yield Table(headings=_CHECK_HEADINGS, rows=check_rows(answer.check), numbers=_CHECK_NUMBERS)


def facts(answer: Answer) -> dict[str, Any]:
    """What JSON and CSV say of every answer, refused or not."""
    model, setup = answer.model, answer.setup
    return {
        "model": model.name,
        "model_type": model.model_type,
        "method": model.method,
        "runtime": setup.runtime,
        "tokens": answer.tokens,
        "batch": setup.batch,
        "tp": setup.tp,
        "context_limit": model.context_limit,
        "beyond_context_limit": answer.beyond_limit,
        "refusal": answer.refusal,
    }


def columns(answers: Sequence[Answer]) -> list[Column]:
    """The columns that these answers need: what no answer has, or all have alike by default, is left out."""
    rows = [
        Column(heading="model", show=lambda answer: answer.model.name, number=False),
        Column(heading="runtime", show=lambda answer: answer.setup.runtime, number=False),
        Column(heading="tokens", show=lambda answer: str(answer.tokens)),
        Column(heading="batch", show=lambda answer: str(answer.setup.batch)),
    ]
    if any(answer.setup.tp > 1 for answer in answers):
        rows.append(Column(heading="tp", show=lambda answer: str(answer.setup.tp)))
    rows += [
        Column(heading="cache", show=_of(cache_type), number=False),
        Column(heading="total", show=_of(lambda found: format_bytes(found.total_bytes))),
        Column(heading="bytes", show=_of(lambda found: str(found.total_bytes))),
        Column(heading="next token", show=_of(lambda found: format_bytes(found.bytes_per_token))),
        Column(heading="fixed state", show=_of(lambda found: format_bytes(found.state_bytes))),
    ]
    if any(answer.footprint and answer.footprint.peaks for answer in answers):
        rows.append(Column(heading="peak", show=_of(lambda found: format_bytes(found.peak_bytes))))
    if any(answer.budget for answer in answers):
        rows += [
            Column(heading="longest context", show=_fitting(lambda fits: _or_any(fits.max_tokens))),
            Column(
                heading="largest batch", show=_fitting(lambda fits: _or_any(fits.max_batch) if fits.tokens else NONE)
            ),
            Column(heading="fits", show=_fitting(lambda fits: _FITS[fits.fits]), number=False),
        ]
    rows.append(Column(heading="by", show=lambda answer: answer.model.method, number=False))
    return rows


def lines_below(answers: Sequence[Answer]) -> list[str]:
    """Formulas, peaks, notes and refusals, one line each, with what they are about in front when there are several."""
    lines: dict[str, None] = {}
    several = len(answers) > 1
    for answer in answers:
        found, about = answer.footprint, f"{_about(answer)}: " if several else ""
        if found is None:
            lines[f"{answer.model.name}, {answer.setup.runtime}: no answer: {answer.refusal}"] = None
            continue
        if len(answers) <= _FORMULAS_AT_MOST:
            lines[f"{about}{found.formula}"] = None
            for peak in found.peaks:
                size = f"{format_bytes(peak.size_bytes)}, {peak.size_bytes} B"
                lines[f"{about}{peak.name}: {size} ({peak.reason})"] = None
        if answer.setup.tp > 1 and len(answers) <= _FORMULAS_AT_MOST:
            lines[f"{about}all {answer.setup.tp} ranks: {format_bytes(found.all_ranks_bytes)}"] = None
        for note in (*found.notes, *answer.model.notes):
            lines[f"{answer.model.name}, {answer.setup.runtime}: {note}" if several else note] = None
        if answer.budget:
            lines[f"{about}{answer.budget.text}"] = None
    for release in dict.fromkeys(f"{a.setup.runtime}: {a.footprint.release}" for a in answers if a.footprint):
        lines[release] = None
    copies = any(answer.setup.runtime == "transformers" for answer in answers)
    lines["steady state; a step needs working memory besides" + _COPIES * copies] = None
    return [visible(line) for line in lines]


_SHARED = {
    "model": "{}",
    "runtime": "{}",
    "batch": "batch {}",
    "tp": "tp {}",
    "cache": "cache {}",
    "fixed state": "fixed state {}",
    "by": "by {}",
}
_DROPPED = ("by", "fixed state", "next token", "peak", "total", "cache")
_COPIES = ", and transformers copies a layer as it grows"
_LAYER_HEADINGS = ("layer", "kind", "heads", "dims", "kept", "bytes", "state bytes")
_LAYER_NUMBERS = (False, False, True, False, True, True, True)
_CHECK_HEADINGS = ("tokens", "what", "predicted", "measured", "")
_CHECK_NUMBERS = (True, False, True, True, False)


def layer_rows(found: Footprint) -> list[tuple[str, ...]]:
    """Each layer as the rank holds it, equal neighbours in one row: kind, heads, dims, kept tokens, bytes, states."""
    layers = [
        (
            layer.kind,
            _joined(tensor.heads for tensor in layer.tensors),
            layer_dims(layer),
            str(sizes.slots) if layer.tensors else NONE,
            str(sizes.size_bytes),
            str(sizes.state_bytes),
        )
        for layer, sizes in zip(found.layers, found.layer_rows, strict=True)
    ]
    return [(_span(first, last), *row) for first, last, row in _runs(layers)]


def layer_dims(layer: LayerKV) -> str:
    """The widths of a layer's tensors and the shapes of its states: `k 128, v 128, conv 8192×4`."""
    tensors = (f"{tensor.name} {tensor.dim}" for tensor in layer.tensors)
    states = (f"{state.name} {'×'.join(str(size) for size in state.shape)}" for state in layer.states)
    return ", ".join((*tensors, *states)) or NONE


def field_rows(answer: Answer) -> list[tuple[str, ...]]:
    """Every field that was used, its value (shortened), and where it came from."""
    return [(visible(field.name), _short(field.value), visible(field.origin)) for field in answer.model.fields]


def check_rows(rows: Sequence[CheckRow]) -> list[tuple[str, ...]]:
    """Prediction beside measurement at each moment: layers (equal neighbours in one line), their sum, the storage."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        for first, last, (predicted, measured) in _runs([*zip_longest(row.predicted_bytes, row.measured_bytes)]):
            name = f"layer {first}" if last == first else f"layers {_span(first, last)}"
            lines.append(_compared(row.tokens, name, predicted, measured))
        lines.append(_compared(row.tokens, "all layers", sum(row.predicted_bytes), sum(row.measured_bytes)))
        lines.append(_compared(row.tokens, "storage", row.predicted_storage_bytes, row.measured_storage_bytes))
    return lines


def _runs(rows: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Equal neighbours once, with the places of the first and the last of them."""
    first = 0
    for row, alike in groupby(rows):
        last = first + len(list(alike)) - 1
        yield first, last, row
        first = last + 1


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}, each"


def cache_type(found: Footprint) -> str:
    """The cache's element type, or both when keys and values differ."""
    return found.k_dtype if found.k_dtype == found.v_dtype else f"{found.k_dtype}/{found.v_dtype}"


def _about(answer: Answer) -> str:
    tp = f", tp {answer.setup.tp}" if answer.setup.tp > 1 else ""
    return f"{answer.model.name}, {answer.setup.runtime}, {answer.tokens} × {answer.setup.batch}{tp}"


def _of(text: Callable[[Footprint], str]) -> Callable[[Answer], str]:
    return lambda answer: NONE if answer.footprint is None else text(answer.footprint)


def _fitting(text: Callable[[Budget], str]) -> Callable[[Answer], str]:
    return lambda answer: NONE if answer.budget is None else text(answer.budget)


def _or_any(count: int | None) -> str:
    return "any" if count is None else str(count)


def _compared(tokens: int, what: str, predicted: int | None, measured: int | None) -> tuple[str, ...]:
    verdict = "=" if predicted == measured else "≠"
    return (
        str(tokens),
        what,
        NONE if predicted is None else str(predicted),
        NONE if measured is None else str(measured),
        verdict,
    )


def _joined(values: Any) -> str:
    distinct = dict.fromkeys(str(value) for value in values)
    return "/".join(distinct) or NONE


def _short(value: object) -> str:
    text = visible(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
