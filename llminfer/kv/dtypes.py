"""Element types of a cache: how many bytes a number of elements takes, scales included."""

from __future__ import annotations

from dataclasses import dataclass

from llminfer.errors import InvalidParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """An element type as blocks: `block_elements` elements together take `block_bytes` bytes.

    Plain types are blocks of one. llama.cpp's block types carry their scales inside the block
    (ggml-common.h: a q8_0 block is one 16-bit scale and 32 8-bit values, so 34 bytes).
    """

    name: str
    block_elements: int = 1
    block_bytes: int

    def size_bytes(self, elements: int) -> int:
        """Bytes of `elements` elements laid out in rows of whole blocks.

        Raises:
            InvalidParams: when the elements do not fill whole blocks.
        """
        blocks, rest = divmod(elements, self.block_elements)
        if rest:
            raise InvalidParams(f"{elements} elements are not whole blocks of {self.block_elements} ({self.name})")
        return blocks * self.block_bytes


ELEMENT_TYPES: dict[str, ElementType] = {
    row.name: row
    for row in (
        ElementType(name="float64", block_bytes=8),
        ElementType(name="int64", block_bytes=8),
        ElementType(name="float32", block_bytes=4),
        ElementType(name="bfloat16", block_bytes=2),
        ElementType(name="float16", block_bytes=2),
        ElementType(name="fp8", block_bytes=1),
        ElementType(name="int8", block_bytes=1),
        ElementType(name="int4", block_elements=2, block_bytes=1),
        ElementType(name="int2", block_elements=4, block_bytes=1),
        ElementType(name="q8_0", block_elements=32, block_bytes=34),
        ElementType(name="q5_1", block_elements=32, block_bytes=24),
        ElementType(name="q5_0", block_elements=32, block_bytes=22),
        ElementType(name="q4_1", block_elements=32, block_bytes=20),
        ElementType(name="q4_0", block_elements=32, block_bytes=18),
    )
}
# types that arithmetic is done in, so that a model's states can have them
FLOAT_TYPES = ("float64", "float32", "bfloat16", "float16")
_ALIASES = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "f64": "float64",
}


def element_type(name: str) -> ElementType:
    """The element type called `name` (`bf16`, `torch.bfloat16` and `bfloat16` are one).

    Raises:
        InvalidParams: for a name that is not in the table; the message lists those that are.
    """
    plain = name.removeprefix("torch.").lower()
    row = ELEMENT_TYPES.get(_ALIASES.get(plain, plain))
    if row is None:
        raise InvalidParams(f"unknown element type {name!r}", hint=f"known: {', '.join(ELEMENT_TYPES)}")
    return row
