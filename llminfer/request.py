"""What a model is loaded with and what a run of it is asked for: one record each, made before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, Unpack

from llminfer.errors import InvalidParams, UsageError
from llminfer.exclusions import check_together
from llminfer.params import (
    DEFAULT_DRAFT_TOKENS,
    DEVICE,
    DTYPES,
    LOOKUPS,
    SHORT_DTYPES,
    CacheOptions,
    Execution,
    Sampling,
    SamplingOverrides,
    Speculation,
    StopCriteria,
    check_range,
    read_sampling,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Which model to load, and how: the arguments of `llminfer.load`.

    Raises:
        InvalidParams: for an unknown device or dtype.
        UsageError: for a device or dtype that the execution cannot be combined with.
    """

    model: str | None = None
    revision: str | None = None
    tokenizer: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    allow_pickle: bool = False
    trust_remote_code: bool = False
    threads: int | None = None
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        if not DEVICE.fullmatch(self.device):
            raise InvalidParams(f"--device {self.device}: unknown", hint="one of auto, cpu, cuda, cuda:N, mps")
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        if self.dtype not in DTYPES:
            raise InvalidParams(f"--dtype {self.dtype}: unknown", hint=f"one of {', '.join(DTYPES)}")
        if self.threads is not None:
            check_range("--threads", self.threads, 1, 4096)
        self.execution.check_placed(device=self.device, dtype=self.dtype)

    def of_draft(self, model: str) -> LoadRequest:
        """How to load a model that drafts for this one."""
        execution = replace(self.execution, compiled=False)
        return replace(self, model=model, revision=None, tokenizer=None, execution=execution)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one run is asked for, whatever the model.

    Attributes:
        text: the prompt, which chat models get through their template.
        messages: a conversation for the template, in place of `text`.
        system: a system message, for chat models.
        raw: leave the chat template out.
        sampling: what is stated of it; the rest comes from the model.
        stop: when to end.
        cache: which one, how it is filled and kept; as suits the model when not given.
        speculation: draft several tokens and check them in one forward; the tokens stay the same.

    Raises:
        UsageError: for options that cannot be combined.
    """

    text: str = ""
    messages: tuple[Mapping[str, str], ...] | None = None
    system: str | None = None
    raw: bool = False
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    stop: StopCriteria = field(default_factory=StopCriteria)
    cache: CacheOptions | None = None
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.messages is not None and self.system is not None:
            raise UsageError("a system message beside messages", hint="put it into the messages")
        if self.cache is not None:
            self.cache_for(Execution())

    def cache_for(self, execution: Execution) -> CacheOptions:
        """The cache that a run with this execution has.

        Raises:
            UsageError: for a cache that cannot be combined with it, or with speculation.
        """
        cache = self.cache or CacheOptions(kind=execution.default_cache)
        drafts = [self.speculation.option] if self.speculation is not None else []
        check_together({*cache.given(), *execution.given(), *drafts})
        return cache


class RequestOptions(TypedDict, total=False):
    """What the library's functions take of a `GenerationRequest`, in handy forms; `llminfer.generate` explains them."""

    sampling: Sampling
    bad_words: Sequence[str]
    stop: StopCriteria | None
    system: str | None
    raw: bool
    cache: str | CacheOptions | None
    speculate: str | None
    draft_tokens: int | None


def make_request(
    prompt: str | GenerationRequest = "", *, drafts: bool = False, **options: Unpack[RequestOptions]
) -> GenerationRequest:
    """The request of a call: a whole one as it is, else that of a text and options; `drafts` with a draft model.

    Raises:
        UsageError: for options beside a whole request, or that cannot be combined.
        InvalidParams: for a value out of its range.
        TypeError: for an option that is none.
    """
    if isinstance(prompt, GenerationRequest):
        if options:
            raise UsageError(f"{next(iter(options))} beside a whole request", hint="put it into the request")
        return prompt
    for name in options.keys() - RequestOptions.__annotations__.keys():
        raise TypeError(f"unexpected option {name!r}; known: {', '.join(RequestOptions.__annotations__)}")
    cache = options.get("cache")
    return GenerationRequest(
        text=prompt,
        system=options.get("system"),
        raw=options.get("raw", False),
        sampling=read_sampling(options.get("sampling"), options.get("bad_words", ())),
        stop=options.get("stop") or StopCriteria(),
        cache=CacheOptions(kind=cache) if isinstance(cache, str) else cache,
        speculation=make_speculation(options.get("speculate"), drafts=drafts, draft_tokens=options.get("draft_tokens")),
    )


def make_speculation(speculate: str | None, *, drafts: bool, draft_tokens: int | None) -> Speculation | None:
    """What the options of a run ask for, None for no speculation; `drafts` with a draft model.

    Raises:
        UsageError: for an unknown kind, or options that cannot be combined.
        InvalidParams: for a number of tokens out of its range.
    """
    asked = {"--speculate": speculate, "--draft": drafts or None, "--draft-tokens": draft_tokens}
    check_together({name for name, value in asked.items() if value is not None})
    if speculate is not None and speculate not in LOOKUPS:
        raise UsageError(
            f"--speculate {speculate}: unknown", hint=f"one of {', '.join(LOOKUPS)}; --draft MODEL for a model"
        )
    kind = "draft-model" if drafts else speculate
    if kind is None:
        return None
    return Speculation(kind=kind, draft_tokens=DEFAULT_DRAFT_TOKENS if draft_tokens is None else draft_tokens)
