"""What is peculiar about the models of one type and shows neither in their config nor in their class.

One row a type, found by running a tiny model of every type; the tests run the rows again, so that one
that no longer holds is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_DRAFTER = "is a drafter, which reads the cache of the model that it drafts for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """The row of one model type; a text is the reason that an error gives.

    Attributes:
        not_alone: why it cannot continue a text by itself.
        one_at_a_time: why several tokens after others get other logits than one after the other would, or fail.
        not_continued: a token after a cached prompt gets other logits than as the last of a prompt, for
            the same reason.
        not_growing: why it cannot have a growing cache.
        not_static: why it can have neither a static cache nor a quantized one.
        not_windowed: it does not take positions and a mask from outside, although its forward names them.
        not_compiled: why its step cannot be compiled over a static cache.
        places: where its attention takes a token's place from when it is not told: "distances" for one that knows
            distances only, so that padding on the left moves nothing; "own" for one that counts its own way
            whatever it is told.
        prompt_without_cache: its inputs lose all but the last token of a prompt when they are prepared with a cache.
    """

    not_alone: str | None = None
    one_at_a_time: str | None = None
    not_continued: bool = False
    not_growing: str | None = None
    not_static: str | None = None
    not_windowed: bool = False
    not_compiled: str | None = None
    places: Literal["distances", "own"] | None = None
    prompt_without_cache: bool = False


_ORDINARY = Quirks()
_FROM_EMPTY = Quirks(one_at_a_time="its prefill starts from an empty state")

QUIRKS: Mapping[str, Quirks] = {
    "biogpt": Quirks(not_compiled="its positions depend on the length of the cache"),
    "bloom": Quirks(places="distances"),
    "blt": Quirks(
        one_at_a_time="its patches are cut in one pass over the prompt",
        not_continued=True,
        not_growing="its patches have caches of their own",
        not_static="its patches have caches of other lengths",
        not_windowed=True,
    ),
    "cpmant": Quirks(
        one_at_a_time="its prompt is fed with a prefix in one pass",
        not_continued=True,
        not_static="its prefix takes places that are not counted",
    ),
    "falcon_mamba": _FROM_EMPTY,
    "gemma4_assistant": Quirks(not_alone=_DRAFTER),
    "gemma4_unified_assistant": Quirks(not_alone=_DRAFTER),
    "git": Quirks(places="own"),  # it puts the places of an image before the mask, even without one
    "idefics": Quirks(not_alone="cannot run without an image"),
    "kosmos-2": Quirks(places="own"),  # both take theirs from the length of the cache
    "kosmos-2.5": Quirks(places="own"),
    "mamba": _FROM_EMPTY,
    "minimax": Quirks(not_static="its layers take a cache class of their own"),
    "moshi": Quirks(one_at_a_time="its depth decoder expects the whole prompt", not_continued=True),
    "mpt": Quirks(places="distances"),
    "musicgen": Quirks(not_alone="writes sound, not text"),
    "musicgen_decoder": Quirks(prompt_without_cache=True),
    "musicgen_melody": Quirks(not_alone="writes sound, not text"),
    "musicgen_melody_decoder": Quirks(prompt_without_cache=True),
    "prophetnet": Quirks(
        one_at_a_time="its decoder takes one token after the first pass",
        not_continued=True,
        not_static="its decoder makes a mask of the cached tokens alone",
    ),
    "recurrent_gemma": _FROM_EMPTY,
    "reformer": Quirks(one_at_a_time="its hash buckets are made in one pass"),
    "xlm": Quirks(
        one_at_a_time="its mask is that of one token after the first pass",
        not_static="its decoder makes a mask of the cached tokens alone",
    ),
    "xlnet": Quirks(one_at_a_time="its permutation mask is that of one pass"),
}


def quirks_of(model_type: str) -> Quirks:
    """The row of a model type, one without quirks where there is none."""
    return QUIRKS.get(model_type, _ORDINARY)
