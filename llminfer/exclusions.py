"""Which options cannot be combined, and which need another: one table for the command line and the library.

An option is named as the command line spells it, with its value where that matters (`--cache none`).
"""

from __future__ import annotations

from collections.abc import Set
from itertools import product

from llminfer.errors import UsageError

_SEVERAL = ("--prompts", "--num-samples")
_DRAFTS = ("--speculate", "--draft")
_SINGLE = ("--echo", "--print-token-ids", "--steps")
_OWN_CACHES = ("--cache growing", "--cache static", "--cache quantized", "--cache none")

# each of these cannot be combined with any of those, for this reason
EXCLUDED: tuple[tuple[tuple[str, ...], tuple[str, ...], str | None], ...] = (
    (("a prompt",), ("--prompt", "--prompt-file", "--prompts"), None),
    (("--prompt",), ("--prompt-file", "--prompts"), None),
    (("--prompts",), ("--prompt-file", "--num-samples", *_SINGLE), None),
    (("--num-samples",), ("--steps",), None),
    (("--json",), ("--steps", "--echo", "--print-token-ids"), None),
    (("--echo",), ("--print-token-ids",), None),
    (("--quiet",), ("--verbose",), None),
    (("--system",), ("--load",), None),
    # the cache of a conversation outlives its answers, and its prompts are rendered anew
    (
        ("chat",),
        ("--compile", "--cache static", "--cache quantized", "--kv-window", "--prefill-chunk", "--prompt-cache"),
        "it keeps a cache that grows from turn to turn",
    ),
    # several sequences share one dynamic cache: what is said about another, or needs one, is for a single run
    (
        _SEVERAL,
        ("--engine native", "--compile", *_OWN_CACHES, "--kv-window", "--prefill-chunk", "--prompt-cache"),
        None,
    ),
    (("--speculate",), ("--draft",), None),
    (_DRAFTS, _SEVERAL, None),
    (_DRAFTS, ("--cache quantized", "--kv-window"), "that cache cannot be cut back"),
    (_DRAFTS, ("--compile",), "a compiled step takes one token"),
    (("--compile",), ("--engine native",), None),
    (("--compile",), ("--kv-window",), "a compiled run keeps a static cache"),
    (
        ("--compile",),
        ("--cache dynamic", "--cache growing", "--cache quantized", "--cache none"),
        "a compiled run keeps a static cache",
    ),
    (("--kv-window",), _OWN_CACHES, None),
    (("--prefill-chunk",), ("--cache none",), "it needs a cache"),
    (("--prompt-cache",), ("--cache none", "--cache quantized"), None),
)

# each of these needs one of those
NEEDED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("--logprobs", ("--json",)),
    ("--output", ("--prompts",)),
    ("--resume", ("--output",)),
    ("--kv-bits", ("--cache quantized",)),
    ("--draft-tokens", ("--speculate", "--draft")),
)


def check_together(given: Set[str]) -> None:
    """Refuse options of which one excludes another, or that lack one which they need.

    Raises:
        UsageError: naming both.
    """
    for these, those, why in EXCLUDED:
        for one, other in product(these, those):
            if one in given and other in given:
                reason = f": {why}" if why else ""
                raise UsageError(f"{one} and {other} cannot be combined{reason}", hint="drop one of them")
    for option, needed in NEEDED:
        if option in given and given.isdisjoint(needed):
            raise UsageError(f"{option} needs {' or '.join(needed)}", hint=f"add {needed[0]}, or drop {option}")
