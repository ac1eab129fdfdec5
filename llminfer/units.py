"""Bytes and seconds to text and back, with binary units by their binary names; and text that is safe to print."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from llminfer.errors import InvalidParams

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTE_FACTORS = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t", "p"))},
    # a bare letter, as `ls -h`, `free -h` and containers mean it
    **{prefix: 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_COUNT_FACTORS = {"": 1, "k": 1000, "m": 1000**2, "ki": 1024, "mi": 1024**2}
RANGE_LIMIT = 1000
# what terminals act on: control characters, other line ends, changes of the writing direction; and half characters
_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(size_bytes: int) -> str:
    """A size in the largest binary unit that keeps it at 1 or more: `1.00 GiB`, `45.0 KiB`, `512 B`."""
    value, power = float(size_bytes), 0
    # 1023.995 would round to 1024.00 of the smaller unit
    while abs(value) >= 1023.995 and power < len(_BINARY) - 1:
        value, power = value / 1024, power + 1
    return f"{size_bytes} B" if power == 0 else f"{value:.2f} {_BINARY[power]}"


def parse_bytes(text: str) -> int:
    """Bytes from `24GiB` or `24G` (powers of 1024), `24GB` (powers of 1000) or a bare number of bytes.

    Raises:
        InvalidParams: when the text is not a positive number with a known unit.
    """
    size = _parse(text, "b", _BYTE_FACTORS)
    if size is None:
        raise InvalidParams(f"{text!r} is not a size", hint="write it like 24GiB, 512MiB, 24GB, 24G or 1073741824")
    return int(size)


def parse_count(text: str) -> int:
    """A token count: `8192`, `8k` (8000), `8Ki` (8192), `1M`, `1Mi`.

    Raises:
        InvalidParams: when the text is not a whole positive number.
    """
    count = _parse(text, "", _COUNT_FACTORS)
    if count is None or not math.isclose(count % 1, 0):
        raise InvalidParams(f"{text!r} is not a token count", hint="write it like 8192, 8k (8000) or 8Ki (8192)")
    return int(count)


def _parse(text: str, unit: str, factors: Mapping[str, int]) -> int | float | None:
    """The number in the text times its unit's factor, that of `unit` where it has none; None for what is neither."""
    match = _NUMBER.fullmatch(text)
    factor = factors.get((match[2] or unit).lower()) if match else None
    if match is None or factor is None or math.isinf(float(match[1]) * factor):
        return None
    return float(match[1]) * factor if "." in match[1] else int(match[1]) * factor


def parse_counts(text: str) -> list[int]:
    """Counts of 1 or more from a list with ranges: `1k,8k,128k`, `1k..128k*2` (doubling), `1k..8k+1k` (steps).

    Raises:
        InvalidParams: when an item is neither a positive count nor a range that rises and ends.
    """
    items = (_parse_range(item) if ".." in item else [_positive_count(item)] for item in text.split(","))
    return [count for counts in items for count in counts]


def _parse_range(text: str) -> list[int]:
    match = re.fullmatch(r"([^.*+]+(?:\.\d[^.*+]*)?)\.\.([^*+]+)([*+])(.+)", text.strip())
    if match is None:
        raise InvalidParams(f"{text.strip()!r} is not a range", hint="write it like 1k..128k*2 or 1k..8k+1k")
    value, last = _positive_count(match[1]), _positive_count(match[2])
    step = _positive_count(match[4])
    if value > last or (match[3] == "*" and step < 2):
        raise InvalidParams(f"the range {text.strip()!r} does not rise", hint="write it like 1k..128k*2 or 1k..8k+1k")
    counts = []
    while value <= last:
        counts.append(value)
        if len(counts) > RANGE_LIMIT:
            raise InvalidParams(f"the range {text.strip()!r} has more than {RANGE_LIMIT} members")
        value = value * step if match[3] == "*" else value + step
    return counts


def _positive_count(text: str) -> int:
    count = parse_count(text)
    if count < 1:
        raise InvalidParams(f"{text.strip()!r} is not 1 or more")
    return count


def format_seconds(duration_s: float) -> str:
    """A duration with three digits that matter: `912 µs`, `63.4 ms`, `4.21 s`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        value = duration_s * factor
        if abs(value) >= 0.9995 or unit == "µs":
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def visible(text: str, *, keep: str = "") -> str:
    """Text of others with what a terminal would act on written out (`\\x1b`), except characters to `keep`."""
    return _ACTING.sub(lambda found: found[0] if found[0] in keep else _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def to_json(document: Mapping[str, Any], *, indent: int | None = None) -> str:
    """One strict JSON document: no NaN, no Infinity, letters of any script as they are.

    What a terminal would act on, or no UTF-8 can hold, is escaped; without an indent it is one line.
    """
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, indent=indent)
    return _ACTING.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)
