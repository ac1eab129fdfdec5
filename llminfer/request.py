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
    """Which model to load, and how.

    Attributes:
        model: a folder, a `.gguf` file or a Hub id; the built-in model when not given.
        revision: the revision of a Hub model.
        tokenizer: a folder to take the tokenizer from, when not the model's own.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: one of `DTYPES`, or of `SHORT_DTYPES`.
        allow_pickle: read pickled weights, with torch's restricted unpickler.
        trust_remote_code: run Python code that the model's repository brings.
        threads: of the processor; as many as torch chooses when not given. They are those of the whole process.
        execution: what carries out the arithmetic.

    Raises:
        InvalidParams: for a device or dtype that is none.
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
    """What the library's functions take of a `GenerationRequest`, in the forms that are handy to write.

    `sampling` may be `SamplingParams`, or some of its values by name; `bad_words` are texts that are never
    completed; `cache` may be a kind alone; `speculate` is `prompt-lookup`, and `draft_tokens` how many
    ids to draft for a forward at most. The others are as in `GenerationRequest`.
    """

    sampling: Sampling
    bad_words: Sequence[str]
    stop: StopCriteria | None
    system: str | None
    raw: bool
    cache: str | CacheOptions | None
    speculate: str | None
    draft_tokens: int | None


def make_request(
    text: str = "",
    *,
    sampling: Sampling = None,
    bad_words: Sequence[str] = (),
    stop: StopCriteria | None = None,
    system: str | None = None,
    raw: bool = False,
    cache: str | CacheOptions | None = None,
    speculate: str | None = None,
    draft_tokens: int | None = None,
    drafts: bool = False,
) -> GenerationRequest:
    """The request that `RequestOptions` describe; `drafts` when a draft model is given.

    Raises:
        UsageError: for options that cannot be combined.
        InvalidParams: for a value out of its range.
    """
    return GenerationRequest(
        text=text,
        system=system,
        raw=raw,
        sampling=read_sampling(sampling, bad_words),
        stop=stop or StopCriteria(),
        cache=CacheOptions(kind=cache) if isinstance(cache, str) else cache,
        speculation=make_speculation(speculate, drafts=drafts, draft_tokens=draft_tokens),
    )


def as_request(
    prompt: str | GenerationRequest, *, drafts: bool = False, **options: Unpack[RequestOptions]
) -> GenerationRequest:
    """The request of a call: a whole one as it is, else that of a text and options.

    Raises:
        UsageError: for options beside a whole request, or that cannot be combined.
        InvalidParams: for a value out of its range.
    """
    if isinstance(prompt, str):
        return make_request(prompt, drafts=drafts, **options)
    if options:
        raise UsageError(f"{next(iter(options))} beside a whole request", hint="put it into the request")
    return prompt


def make_speculation(speculate: str | None, *, drafts: bool, draft_tokens: int | None) -> Speculation | None:
    """What the options of a run ask for, None for no speculation; `drafts` when a draft model is given.

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
