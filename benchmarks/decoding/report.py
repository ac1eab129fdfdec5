"""From what a session measured to one strict JSON document, and from that to a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.decoding.contenders import REFERENCE, Contender
from benchmarks.decoding.session import Run, Session

SCHEMA_VERSION = 1
# a waiting contender that uses more of one core disturbs the others
IDLE_LIMIT = 0.05
# other programs that use more of the cores make the figures worthless, and most so the best
BUSY_LIMIT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was run: the same for every contender.

    `kv_elements` are the keys and values of a step in the middle of the run, which is the mean step.
    """

    model: str
    prompt_tokens: int
    new_tokens: int
    rounds: int
    threads: int
    kv_elements: int
    machine: Mapping[str, Any]
    date: str


def document_of(
    setting: Setting,
    contenders: Sequence[Contender],
    session: Session,
    facts: Mapping[str, Mapping[str, Any]],
    idle: Mapping[str, float],
) -> dict[str, Any]:
    """Everything as plain JSON values; a figure that cannot be had is null.

    Args:
        facts: what each worker said of itself when it was loaded, and its peak of memory.
        idle: cores that each used while it waited.
    """
    reference = session.runs.get(REFERENCE)
    rows = [
        _row(contender, session.runs[contender.name], reference, session, setting, facts.get(contender.name, {}))
        for contender in contenders
        if session.runs.get(contender.name)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "decode",
        "date": setting.date,
        "machine": dict(setting.machine),
        "model": setting.model,
        "prompt_tokens": setting.prompt_tokens,
        "new_tokens": setting.new_tokens,
        "rounds": setting.rounds,
        "threads": setting.threads,
        "reference": REFERENCE,
        "bandwidth_bytes_per_s": _spread(session.bandwidths_bytes_per_s),
        "busy_cores_between_runs": _spread(session.busy_cores) if session.busy_cores else None,
        "contenders": rows,
        "skipped": [
            {"name": contender.name, "reason": session.skipped[contender.name]}
            for contender in contenders
            if contender.name in session.skipped
        ],
        "busy_while_waiting": {name: cores for name, cores in idle.items() if cores > IDLE_LIMIT},
    }


def _row(
    contender: Contender,
    runs: Sequence[Run],
    reference: Sequence[Run] | None,
    session: Session,
    setting: Setting,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    decode = [(setting.new_tokens - 1) / run.decode_s for run in runs]
    prefill = [setting.prompt_tokens / run.prefill_s for run in runs]
    weight_bytes = facts.get("weight_bytes")
    kv_bytes = setting.kv_elements * contender.kv_bytes_per_element
    read = None if weight_bytes is None else weight_bytes + kv_bytes
    share = None
    if read is not None:
        share = [
            rate * read / bandwidth for rate, bandwidth in zip(decode, session.bandwidths_bytes_per_s, strict=True)
        ]
    return {
        "name": contender.name,
        "kind": contender.kind,
        "options": dict(contender.options),
        "version": facts.get("version"),
        "decode_tokens_per_s": _spread(decode),
        "decode_ratio": _ratios([run.decode_s for run in runs], reference and [run.decode_s for run in reference]),
        "prefill_tokens_per_s": _spread(prefill),
        "prefill_ratio": _ratios([run.prefill_s for run in runs], reference and [run.prefill_s for run in reference]),
        "weight_bytes": weight_bytes,
        "mean_kv_bytes": kv_bytes,
        "roofline_share": None if share is None else _spread(share),
        "peak_bytes": facts.get("peak_bytes"),
        "equal_tokens": None if reference is None else min(map(agreeing, runs, reference)),
        "load_s": facts.get("load_s"),
    }


def agreeing(run: Run, reference: Run) -> int:
    """Tokens from the start that are the reference's."""
    pairs = zip(run.tokens, reference.tokens, strict=False)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(run.tokens))


def _ratios(seconds: Sequence[float], reference_s: Sequence[float] | None) -> dict[str, Any] | None:
    """How many times as fast as the reference of the same round."""
    if not reference_s:
        return None
    return _spread([theirs / ours for ours, theirs in zip(seconds, reference_s, strict=True)])


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": list(values),
    }


# the table

_COLUMNS = ("contender", "decode tokens/s", "×", "prefill tokens/s", "×", "roofline", "weights", "peak", "same tokens")


def format_document(document: Mapping[str, Any]) -> str:
    """The document as text for people: a line per contender, then what was skipped, then what was read."""
    rows = [_COLUMNS, *(_cells(row, document["new_tokens"]) for row in document["contenders"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    lines += [f"skipped {skip['name']}: {skip['reason']}" for skip in document["skipped"]]
    lines += [
        f"note: {name} used {cores:.2f} cores while it waited, which slows the others"
        for name, cores in document["busy_while_waiting"].items()
    ]
    busy, bandwidth = document["busy_cores_between_runs"], document["bandwidth_bytes_per_s"]
    if busy is not None and busy["median"] > BUSY_LIMIT:
        lines.append(f"note: other programs kept {busy['median']:.1f} cores busy; these figures are not to be trusted")
    head = (
        f"{document['model']} · {document['prompt_tokens']} + {document['new_tokens']} tokens, greedy · "
        f"{_count(document['threads'], 'thread')} · {_count(document['rounds'], 'round')} · memory read at "
        f"{bandwidth['median'] / 1e9:.1f} GB/s ({bandwidth['min'] / 1e9:.1f}–{bandwidth['max'] / 1e9:.1f})"
    )
    return "\n".join([head, *lines])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def _cells(row: Mapping[str, Any], new_tokens: int) -> tuple[str, ...]:
    share, equal = row["roofline_share"], row["equal_tokens"]
    return (
        row["name"],
        _rate(row["decode_tokens_per_s"]),
        _ratio(row["decode_ratio"]),
        _rate(row["prefill_tokens_per_s"]),
        _ratio(row["prefill_ratio"]),
        "–" if share is None else f"{share['median']:.2f}",
        _mebibytes(row["weight_bytes"]),
        _mebibytes(row["peak_bytes"]),
        "–" if equal is None else f"all {equal}" if equal == new_tokens else f"first {equal}",
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _rate(spread: Mapping[str, Any]) -> str:
    return f"{spread['median']:.1f} ({spread['min']:.1f}–{spread['max']:.1f})"


def _ratio(spread: Mapping[str, Any] | None) -> str:
    return "–" if spread is None else f"{spread['median']:.2f}"


def _mebibytes(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else f"{size_bytes / 1024**2:.0f} MiB"
