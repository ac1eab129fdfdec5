"""Which library quantizes a cache to how many bits, found without importing any."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from llminfer.errors import UsageError


def quantizer(bits: int) -> tuple[str, int]:
    """The library that quantizes to so many bits and is installed, and the axis it groups along.

    Raises:
        UsageError: when none is, with the command that installs one.
    """
    rows = _QUANTIZERS[bits]
    for name, package, axis in rows:
        if _has(package):
            return name, axis
    wanted = " or ".join(_PACKAGES[name] for name, _, _ in rows)
    raise UsageError(
        f"--cache quantized with {bits} bits needs {wanted}, which is not installed",
        hint=f"pip install {_PACKAGES[rows[0][0]]}",
    )


# bits: (transformers' name of the library, its module, the axis of its groups), the preferred one first.
# Along axis 0 HQQ packs any number of groups; 8 bits need no packing, so that groups can stay within a token.
_QUANTIZERS: Mapping[int, Sequence[tuple[str, str, int]]] = {
    8: (("hqq", "hqq", 1),),
    4: (("quanto", "optimum.quanto", 0), ("hqq", "hqq", 0)),
    2: (("quanto", "optimum.quanto", 0), ("hqq", "hqq", 0)),
}
_PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
