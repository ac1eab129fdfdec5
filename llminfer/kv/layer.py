"""The records: what one layer caches, and what a whole model caches. Numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """A cache tensor that grows with the tokens: `heads · dim` elements an entry.

    Most tensors have one entry for each kept token. Some do not:

    - `stride` s > 1: one entry for every s tokens seen (compressed entries). With `remainder` it is
      the other part: one entry for each token since the last multiple of s (a buffer that empties).
    - `at_most`: never more entries than this (the last compressed entry's overlap: 0, then 1).
    - `extra_tokens`: entries beside those of the tokens (a learned prefix, a dummy token).
    - `after` n: none at all until there are more than n tokens (Reformer's hash buckets).
    - `windowed` False: the layer's window does not apply to this tensor.
    - `chunks`: a prompt longer than the shortest of them is padded to a multiple of all; the padding
      stays allocated until the next step.

    `dtype` is None where the tensor follows the cache's element type, else the type it is pinned to.
    `heads` is what the architecture needs; `transformers_heads` is what transformers caches where
    that is another number (Falcon's repeated heads; 0 where it keeps no cache at all).
    """

    name: str
    heads: int
    dim: int
    dtype: str | None = None
    transformers_heads: int | None = None
    stride: int = 1
    remainder: bool = False
    at_most: int | None = None
    extra_tokens: int = 0
    after: int = 0
    windowed: bool = True
    chunks: tuple[int, ...] = ()

    def padding(self, tokens: int) -> int:
        """Entries that a prompt of so many tokens leaves allocated beyond them."""
        return -tokens % math.lcm(*self.chunks) if self.chunks and tokens > min(self.chunks) else 0

    @property
    def elements(self) -> int:
        """Elements of one entry, as the architecture needs them."""
        return self.heads * self.dim

    def entries(self, *, tokens: int, kept: int) -> int:
        """Entries after `tokens` tokens of a sequence, of which the layer's window keeps `kept`."""
        seen = kept if self.windowed else tokens
        if tokens <= self.after:
            seen = 0
        count = seen % self.stride if self.remainder else seen // self.stride
        return min(count, self.at_most if self.at_most is not None else count) + self.extra_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A cache tensor whose size does not depend on the tokens seen (a recurrent or convolution state).

    `shape` is per sequence, and its first dimension (channels or heads) is what tensor parallelism
    splits; `dtype` as in `PerToken`. `role` is `recurrent`, or `conv` for the last inputs of a
    causal convolution: `shape[-1]` columns, as many as transformers keeps. `needed_columns` is how
    many the next step reads (the kernel's width − 1). `sliced_off` elements stay allocated beside
    it after a step of transformers, where the state is a slice of a larger tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    role: str = "recurrent"
    needed_columns: int | None = None
    sliced_off: int = 0

    @property
    def elements(self) -> int:
        """Elements per sequence, as transformers keeps them."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """One layer's cache as numbers.

    Full, sliding, chunked, latent, shared and recurrent layers are this same record with other
    numbers: `tensors` grow with the tokens, `window` is the number of tokens that attention can
    see (the newest included; None: all), `states` do not grow. How many tokens of a window stay
    cached is the runtime's choice, not the layer's. A layer with neither holds nothing: it reuses
    another layer's cache or has no attention. `kind` is a name for people; `latent` says that one
    compressed entry serves all heads, so that there are none to count or to split.
    """

    kind: str
    latent: bool = False
    tensors: tuple[PerToken, ...] = ()
    window: int | None = None
    states: tuple[State, ...] = ()

    @property
    def elements_per_token(self) -> int:
        """Elements that one more token adds while the window is not full, averaged over a stride."""
        return sum(tensor.elements // tensor.stride for tensor in self.tensors if not tensor.remainder)


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
    for; `dtype_assumed` says that its config states none. `stored_dtype` is what a quantized checkpoint
    asks its cache to be, for runtimes that follow it. `context_limit` is the longest sequence the
    model was made for, None when it states none. `method` is `formula` or `dry run`. `notes` are
    sentences that the answer has to carry.
    """

    name: str
    model_type: str
    layers: tuple[LayerKV, ...]
    dtype: str
    dtype_assumed: bool = False
    stored_dtype: str | None = None
    context_limit: int | None = None
    fields: tuple[Field, ...] = ()
    method: str = "formula"
    notes: tuple[str, ...] = ()
