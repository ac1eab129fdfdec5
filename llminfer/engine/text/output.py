"""What ends a run: EOS ids, stop texts found over token boundaries and never half printed, the token limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from llminfer.engine.machine.clock import Clock
from llminfer.engine.text.detokenizer import Detokenizer, make_detokenizer, special_tokens
from llminfer.engine.text.tokenizer import Tokenizer
from llminfer.errors import UsageError
from llminfer.events import FinishReason
from llminfer.params import StopCriteria


@dataclass(slots=True)
class StopMatcher:
    """Lets text through until a stop text is complete; the first to be complete wins.

    Text that may be the beginning of a stop text is held until that is decided. Of two that
    complete at the same character the longer wins, so the result does not depend on how the text
    was cut into pieces.
    """

    stops: Sequence[str]
    held: str = ""
    matched: str | None = None
    _held_shown: bytes = b""  # for each held character, whether it is to be shown
    _longest: int = field(init=False)

    def __post_init__(self) -> None:
        self._longest = max(map(len, self.stops), default=0)

    def push(self, text: str, hidden: str = "") -> str:
        """Take more text, and what comes after it and is never shown; return what is safe to show.

        After a match nothing more comes out.
        """
        if not self._longest or self.matched is not None:
            return text if self.matched is None else ""
        buffer, shown = self.held + text + hidden, self._held_shown + b"\1" * len(text) + b"\0" * len(hidden)
        found = min(((at + len(stop), at, stop) for stop in self.stops if (at := buffer.find(stop)) >= 0), default=None)
        if found is not None:
            _, end, self.matched = found
            self.held, self._held_shown = "", b""
        else:
            end = len(buffer) - self._held_length(buffer)
            self.held, self._held_shown = buffer[end:], shown[end:]
        return "".join(compress(buffer[:end], shown))

    def flush(self) -> str:
        """The held text, once no more text will come."""
        text = "".join(compress(self.held, self._held_shown))
        self.held, self._held_shown = "", b""
        return text

    def _held_length(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop text."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimit:
    """The most tokens to generate, and what reaching that is called."""

    tokens: int
    reason: FinishReason = "length"


def token_limit(
    prompt_tokens: int, max_new_tokens: int, context: int | None, *, conversation: bool = False
) -> TokenLimit:
    """The most tokens to generate, and why no more.

    A model with a context of C is fed C tokens at most; the last one generated is not fed again,
    so prompt + generated − 1 ≤ C.

    Raises:
        UsageError: for a prompt, or a conversation, longer than the context.
    """
    if context is None:
        return TokenLimit(tokens=max_new_tokens)
    if prompt_tokens > context:
        what = "with this message the conversation" if conversation else "the prompt"
        raise UsageError(
            f"{what} has {prompt_tokens} tokens, and the model's context is {context}",
            hint="shorten the message, or begin a new conversation" if conversation else "shorten the prompt",
        )
    room = context - prompt_tokens + 1
    return TokenLimit(tokens=max_new_tokens) if max_new_tokens <= room else TokenLimit(tokens=room, reason="context")


@dataclass(slots=True, kw_only=True)
class Output:
    """Turns generated ids into the text to show, until `reason` says why the run ends.

    The text of `eos_ids` is never shown; `hidden_texts` are not either, but stop texts may be found in them.
    `token_text` gives a token's own text, for records; `detail` is the EOS id or stop text that ended the run.
    """

    detokenizer: Detokenizer
    matcher: StopMatcher
    eos_ids: frozenset[int]
    limit: TokenLimit
    token_text: Callable[[int], str]
    hidden_texts: Mapping[int, str] = field(default_factory=dict)
    out_of_time: Callable[[], bool] = lambda: False
    count: int = 0
    reason: FinishReason | None = None
    detail: int | str | None = None

    def __post_init__(self) -> None:
        if not self.limit.tokens:
            self.reason = self.limit.reason

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that became final with it."""
        self.count += 1
        if token_id in self.eos_ids:
            self.reason, self.detail = "eos", token_id
            return ""
        text = self.matcher.push(self.detokenizer.push(token_id), self.hidden_texts.get(token_id, ""))
        if self.matcher.matched is not None:
            self.reason, self.detail = "stop", self.matcher.matched
        elif self.count >= self.limit.tokens:
            self.reason = self.limit.reason
        elif self.out_of_time():
            self.reason = "time"
        return text

    def flush(self) -> str:
        """The text still held, once no more ids will come; it too is searched for stop texts."""
        if self.matcher.matched is not None:
            return ""
        text = self.matcher.push(self.detokenizer.flush())
        if self.matcher.matched is not None:
            self.reason, self.detail = "stop", self.matcher.matched
        return text + self.matcher.flush()


def make_output(
    tokenizer: Tokenizer,
    stop: StopCriteria,
    limit: TokenLimit,
    clock: Clock,
    *,
    eos_ids: frozenset[int] = frozenset(),
    began_s: float = 0.0,
) -> Output:
    """What turns the ids of one run, which began at `began_s` on the clock, into text and ends it."""
    max_time_s = stop.max_time_s
    return Output(
        detokenizer=make_detokenizer(tokenizer),
        matcher=StopMatcher(stop.stop),
        hidden_texts=_hidden_texts(tokenizer, stop.stop),
        eos_ids=frozenset() if stop.ignore_eos else eos_ids,
        limit=limit,
        token_text=lambda token_id: token_text(tokenizer, token_id),
        out_of_time=(lambda: False) if max_time_s is None else (lambda: clock.elapsed() - began_s >= max_time_s),
    )


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's own text, special tokens included; a sentencepiece word keeps its leading space."""
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    token = tokenizer.convert_ids_to_tokens(token_id)
    return f" {text}" if token and token.startswith("▁") and not text.startswith(" ") else text


def _hidden_texts(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """The special tokens that a stop text names: they are not shown, and end a run all the same."""
    tokens = special_tokens(tokenizer) if stops else {}
    return {token_id: token for token_id, token in tokens.items() if any(token in stop for stop in stops)}
