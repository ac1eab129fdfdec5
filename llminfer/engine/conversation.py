"""A conversation whose cache outlives its answers: every turn feeds only what the cache does not hold yet.

The whole conversation is rendered anew for every turn, since a template may write earlier turns
differently later. Of the cached tokens those stay that begin the new rendering; the others are
taken back where the cache can do that, else the cache begins anew. So an answer is what a run over
the whole conversation gives.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from typing import Unpack

from llminfer.engine.forward.cache_reuse import FeedMode, choose_feed_mode, common_prefix, exact_length
from llminfer.engine.forward.chunks import ChunkedForward
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.generate import run
from llminfer.engine.machine.clock import Clock
from llminfer.engine.model import LoadedModel
from llminfer.engine.prepare import OpenForward, prepare_run
from llminfer.engine.speculative_loop import Drafting, make_drafting
from llminfer.engine.text.output import TokenLimit
from llminfer.engine.text.prompt import Prompt
from llminfer.errors import UsageError
from llminfer.events import Event, Finished, FinishReason, Step
from llminfer.exclusions import check_together
from llminfer.request import GenerationRequest, RequestOptions, make_request
from llminfer.transcript import Message


class Conversation:
    """A chat with a loaded model.

        >>> chat = Conversation(model, sampling={"temperature": 0})
        >>> for event in chat.ask("What is the capital of France?"):
        ...     pass
        >>> chat.messages[-1].content
        'The capital of France is Paris.'

    Args:
        request: how each answer is sampled and ended, and which cache outlives the answers, as one record.
        messages: what was said before.
        draft: the model that drafts, for speculation of that kind.
        options: in place of `request`, as in `generate`; the cache is `dynamic` or `growing`, or `none` to
            recompute everything.

    Raises:
        UsageError: for a model without a chat template, a draft model with another vocabulary, or a cache
            that cannot outlive an answer.
        UnsupportedArchitecture: for a model that cannot speculate.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        request: GenerationRequest | None = None,
        *,
        messages: Sequence[Message] = (),
        draft: LoadedModel | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        request = make_request(request or "", drafts=draft is not None, **options)
        if not loaded.tokenizer.chat_template:
            raise UsageError(
                f"{loaded.name} has no chat template, so it cannot chat",
                hint='try: llminfer generate --raw "Once upon a time"',
            )
        self._loaded, self._request, self._draft = loaded, request, draft
        self._options = request.cache_for(loaded.execution)
        check_together({"chat", *loaded.execution.given(), *self._options.given()})
        self._drafting()
        self._forward: ChunkedForward | None = None
        self._feed_mode: FeedMode | None = FeedMode.NEVER if self._options.kind == "none" else None
        self._exact_length = exact_length(loaded.model.config)
        self.messages: tuple[Message, ...] = tuple(messages)

    def restart(self, messages: Sequence[Message] = ()) -> None:
        """Start a new conversation, or go on with another one; what the cache shares with it stays of use."""
        self.messages = tuple(messages)

    def ask(self, text: str) -> Generator[Event, None, None]:
        """Say something and yield the events of the answer, as `generate` does for a single prompt.

        Afterwards both are in `messages`, an answer that was cut as far as it went. A message that was
        refused, or whose answer broke off before its first character, is not.

        Raises:
            UsageError: before the first event, for a conversation that no longer fits the context or
                that the template refuses.
            InvalidParams: before the first event, for a value out of its range.
        """
        asked = (*self.messages, Message(role="user", content=text))
        prepared = prepare_run(
            self._loaded,
            replace(self._request, messages=tuple(asdict(message) for message in asked)),
            open_forward=self._continue,
            drafting=self._drafting(),
        )
        return self._record(asked, run(prepared))

    def _drafting(self) -> Drafting | None:
        """What drafts for one answer: it follows one sequence, and what was said before may be written anew."""
        return make_drafting(self._request.speculation, self._loaded, self._draft, self._options)

    def _continue(self, prompt: Prompt, limit: TokenLimit, clock: Clock) -> OpenForward:
        """The forward for this prompt, which has what is cached of it."""
        ids, loaded = prompt.ids, self._loaded
        if self._feed_mode is None:
            self._feed_mode = choose_feed_mode(loaded.model, ids)
            clock.skip()  # it is no part of any answer
        kept, self._forward = self._forward, None
        notes: tuple[str, ...] = ()
        if kept is not None and kept.ids and kept.kv_bytes is not None:
            # at least one token is fed, for the logits that come after it
            shared = min(common_prefix(kept.ids, ids), len(ids) - 1)
            why_not = self._why_not(kept, ids, shared)
            if why_not is None:
                self._forward = kept
                return OpenForward(forward=kept)
            notes = (why_not,) if shared else ()
        del kept  # its cache goes before the next one grows
        factory = loaded.forward_factory_for(self._options)
        one_by_one = self._feed_mode is FeedMode.ONE_BY_ONE
        self._forward = make_forward(loaded.model, options=self._options, factory=factory, one_by_one=one_by_one)
        return OpenForward(forward=self._forward, notes=notes)

    def _why_not(self, kept: ChunkedForward, ids: tuple[int, ...], shared: int) -> str | None:
        """Why the cache cannot be gone on with, None when it can; what is no longer said is taken back."""
        everything = f"all {len(ids)} tokens are read anew"
        longest = max(len(ids), len(kept.ids))
        if not shared:
            return everything
        if self._exact_length is not None and longest > self._exact_length:
            return f"beyond {self._exact_length} tokens this model's keys depend on the length, so {everything}"
        if self._feed_mode is FeedMode.NEVER:
            return f"this model does not go on from a cache exactly, so {everything}"
        if not kept.crop(shared):
            return f"the last turn is written differently now and this cache cannot be cropped, so {everything}"
        return None

    def _record(self, asked: tuple[Message, ...], events: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """Pass the events on, and keep what was said however they end."""
        said: list[str] = []
        reason: FinishReason | None = None
        try:
            event = next(events, None)
            while event is not None:
                if isinstance(event, Step | Finished):
                    said.append(event.text)
                if isinstance(event, Finished):
                    reason = event.reason
                    self._keep(asked, "".join(said), reason)
                try:
                    yield event
                except KeyboardInterrupt as interrupt:
                    event = events.throw(interrupt)
                else:
                    event = next(events, None)
        finally:
            if reason is None:  # the reader left
                self._keep(asked, "".join(said), "interrupted")

    def _keep(self, asked: tuple[Message, ...], text: str, reason: FinishReason) -> None:
        if text or reason not in ("interrupted", "error"):
            self.messages = (*asked, Message(role="assistant", content=text))
