"""One run of a loaded model, from a request to the events that `decode` yields."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial

import torch

from llminfer.engine.forward.cache_reuse import exact_length
from llminfer.engine.forward.forward import PlainForward, make_forward
from llminfer.engine.forward.torch_compile import CompiledStep, compile_step, compiled_room
from llminfer.engine.kv_cache.kinds import check_cache
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.model import LoadedModel
from llminfer.engine.prediction import predict
from llminfer.engine.prepare import OpenForward, PreparedRun, prepare_run
from llminfer.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from llminfer.engine.run_errors import explain
from llminfer.engine.speculative_loop import Drafting, decode_drafts, make_drafting
from llminfer.engine.text.output import Output, TokenLimit
from llminfer.engine.text.prompt import Prompt
from llminfer.errors import GenerationFailed, LlminferError
from llminfer.events import DraftCache, Event, Finished, Step
from llminfer.params import CacheOptions
from llminfer.request import GenerationRequest
from llminfer.text import reason_of


def generate(
    loaded: LoadedModel, request: GenerationRequest, *, draft: LoadedModel | None = None
) -> Generator[Event, None, None]:
    """Continue a prompt, as `llminfer.generate` does."""
    options = request.cache_for(loaded.execution)
    check_cache(options, loaded.model.config, loaded.name, known=type(loaded.model))
    drafting = make_drafting(request.speculation, loaded, draft, options)
    open_forward = partial(_open_forward, loaded, options)
    return run(prepare_run(loaded, request, open_forward=open_forward, drafting=drafting))


def run(prepared: PreparedRun) -> Generator[Event, None, None]:
    """The events of a run that has a forward of its own."""
    loaded, started, opened = prepared.loaded, prepared.started, prepared.opened
    assert opened is not None
    yield started
    output = prepared.make_output()
    finished = yield from _decode(prepared, opened, output)
    error = None
    if finished.error:
        error = explain(finished.error, output.count, loaded, started, now=prepared.predict(output.count))
    if prepared.options.file is not None and error is None and prepared.limit.tokens:
        try:
            save_prompt_cache(prepared.options.file, loaded, opened.forward, prepared.options)
        except LlminferError as not_saved:
            if finished.reason == "interrupted":
                finished = replace(finished, notes=(*finished.notes, not_saved.message))
            else:
                error = not_saved
    kv = prepared.predict(output.count - 1) if output.count else None
    yield replace(finished, error=error, kv=kv, draft_cache=_draft_cache(prepared.drafting))


def _decode(prepared: PreparedRun, opened: OpenForward, output: Output) -> Generator[Step, None, Finished]:
    """The loop of this run: token by token, or with drafts."""
    ids, reused = prepared.started.prompt_ids, prepared.started.reused_tokens
    clock, drafting, sample = prepared.clock, prepared.drafting, prepared.make_sampler()
    if drafting is None:
        return decode(opened.forward, sample, output, clock, prompt_ids=ids[reused:], cached=reused)
    return decode_drafts(
        opened.forward,
        drafting.drafter,
        sample,
        output,
        clock,
        prompt_ids=ids,
        cached=reused,
        draft_tokens=drafting.speculation.draft_tokens,
        exact_length=exact_length(prepared.loaded.model.config),
    )


def _draft_cache(drafting: Drafting | None) -> DraftCache | None:
    """What the draft model's own cache holds now that the run has ended."""
    if drafting is None or drafting.draft is None or drafting.drafter.forward is None:
        return None
    forward, draft = drafting.drafter.forward, drafting.draft
    tokens = len(forward.ids)
    if not tokens or not forward.crop(tokens) or forward.kv_bytes is None:
        return None
    kv = predict(draft, tokens, draft.execution.default_cache)
    return DraftCache(cached_tokens=tokens, kv_bytes=forward.kv_bytes, kv=kv)


@torch.inference_mode()  # a compiled step was made for tensors of this mode, and so are the loop's
def _open_forward(
    loaded: LoadedModel, options: CacheOptions, prompt: Prompt, limit: TokenLimit, clock: Clock
) -> OpenForward:
    """A forward that holds what a saved cache has of the prompt, so that only the rest is to be fed."""
    room, compiled = len(prompt.ids) + max(limit.tokens - 1, 0), None
    factory = loaded.forward_factory_for(options)
    if loaded.execution.compiled:
        room = compiled_room(room)
        compiled = _compiled_once(loaded, room)
        factory = partial(PlainForward, step=compiled.call)
        clock.skip()
    saved = None
    if options.file is not None:
        saved = load_prompt_cache(options.file, loaded, options, max_tokens=room, prompt_ids=prompt.ids)
    cache, cached_ids = saved if saved is not None else (None, ())
    try:
        forward = make_forward(
            loaded.model, options=options, max_tokens=room, cache=cache, cached_ids=cached_ids, factory=factory
        )
    except LlminferError:
        raise
    except Exception as error:
        raise GenerationFailed(f"cannot run {loaded.name}: {reason_of(error)}", hint="--debug shows where") from error
    opened = OpenForward(forward=forward, room=room)
    return opened if compiled is None else replace(opened, compile_s=compiled.compile_s, notes=compiled.notes)


def _compiled_once(loaded: LoadedModel, room: int) -> CompiledStep:
    """The compiled step of a model for so many tokens, made and warmed up by the first run that needs it."""
    made = loaded.compiled_steps.get(room)
    if made is not None:
        return replace(made, compile_s=0.0)
    return loaded.compiled_steps.setdefault(room, compile_step(loaded.model, room))
