"""Bytes and seconds to text and back. Binary units are called by their binary names."""

from __future__ import annotations

import math
import re

from llminfer.errors import InvalidParams

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTE_FACTORS = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t", "p"))},
}
_COUNT_FACTORS = {"": 1, "k": 1000, "m": 1000**2, "ki": 1024, "mi": 1024**2}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(size_bytes: int) -> str:
    """A size in the largest binary unit that keeps it at 1 or more: `1.00 GiB`, `45.0 KiB`, `512 B`."""
    value, power = float(size_bytes), 0
    # 1023.995 would round to 1024.00 of the smaller unit
    while abs(value) >= 1023.995 and power < len(_BINARY) - 1:
        value, power = value / 1024, power + 1
    return f"{size_bytes} B" if power == 0 else f"{value:.2f} {_BINARY[power]}"


def parse_bytes(text: str) -> int:
    """Bytes from `24GiB`, `24GB` (powers of 1000) or a bare number of bytes.

    Raises:
        InvalidParams: when the text is not a positive number with a known unit.
    """
    match = _NUMBER.fullmatch(text)
    factor = _BYTE_FACTORS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise InvalidParams(f"{text!r} is not a size", hint="write it like 24GiB, 512MiB, 24GB or 1073741824")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_count(text: str) -> int:
    """A token count: `8192`, `8k` (8000), `8Ki` (8192), `1M`, `1Mi`.

    Raises:
        InvalidParams: when the text is not a whole positive number.
    """
    match = _NUMBER.fullmatch(text)
    factor = _COUNT_FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or not math.isclose(float(match[1]) * factor % 1, 0):
        raise InvalidParams(f"{text!r} is not a token count", hint="write it like 8192, 8k (8000) or 8Ki (8192)")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_seconds(duration_s: float) -> str:
    """A duration with three digits that matter: `912 µs`, `63.4 ms`, `4.21 s`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        value = duration_s * factor
        if abs(value) >= 0.9995 or unit == "µs":
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")
