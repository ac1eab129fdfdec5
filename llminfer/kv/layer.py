"""The records: what one layer caches, and what a whole model caches. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """A cache tensor with one entry per kept token: `heads · dim` elements each.

    `dtype` is None where the tensor follows the cache's element type, else the type it is pinned to.
    `transformers_heads` is the number of heads that transformers caches where that is not `heads`.
    """

    name: str
    heads: int
    dim: int
    dtype: str | None = None
    transformers_heads: int | None = None

    @property
    def elements(self) -> int:
        """Elements per token and sequence."""
        return self.heads * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A cache tensor whose size does not depend on the tokens seen (a recurrent or convolution state).

    `shape` is per sequence, channels or heads first; `dtype` as in `PerToken`. The last dimension
    of a state whose `role` is `conv` are its k columns.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    role: str = "recurrent"

    @property
    def elements(self) -> int:
        """Elements per sequence."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """One layer's cache as numbers.

    Full, sliding, chunked, latent, shared and recurrent layers are this same record with other
    numbers: `tensors` grow with the tokens, `window` is the number of tokens that attention can
    see (the newest included; None: all), `states` do not grow. How many tokens of a window stay
    cached is the runtime's choice, not the layer's.
    """

    kind: str
    tensors: tuple[PerToken, ...] = ()
    window: int | None = None
    states: tuple[State, ...] = ()

    @property
    def elements_per_token(self) -> int:
        """Elements that one more token adds while the window is not full."""
        return sum(tensor.elements for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A config field that was used, its value, and where it came from.

    `origin` is `file`, or a sentence such as `class default of transformers 5.24.0` or
    `hidden_size / num_attention_heads`.
    """

    name: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKV:
    """What a model caches, layer by layer, and the fields that say so.

    `dtype` is the element type the model computes in, so that of its cache unless one is asked
    for. `context_limit` is the longest sequence the model was made for, None when it states none.
    `method` says how the layers were found: by `formula`, or by a `dry run` of the real classes.
    """

    name: str
    model_type: str
    layers: tuple[LayerKV, ...]
    dtype: str
    context_limit: int | None = None
    fields: tuple[Field, ...] = ()
    method: str = "formula"
