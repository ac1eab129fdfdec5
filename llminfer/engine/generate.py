"""One run from a loaded model and a prompt to the events that `decode` yields, composed before the loop."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from llminfer.engine.forward.cache_reuse import exact_length
from llminfer.engine.forward.chunks import prefill_chunk
from llminfer.engine.forward.forward import PlainForward, make_forward
from llminfer.engine.forward.protocol import Forward
from llminfer.engine.forward.torch_compile import CompiledStep, compile_step, compiled_room
from llminfer.engine.kv_cache.kinds import TokenSchedule, check_cache, chunk_sizes
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.machine.device import device_name, synchronizer
from llminfer.engine.model import LoadedModel
from llminfer.engine.prediction import _predict, predict
from llminfer.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from llminfer.engine.run_errors import explain
from llminfer.engine.sampling.resolve import effective_sampling, effective_stop, with_bad_words
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.speculative_loop import Drafting, decode_drafts, make_drafting
from llminfer.engine.text.detokenizer import make_detokenizer, special_token_ids
from llminfer.engine.text.output import Output, StopMatcher
from llminfer.engine.text.prompt import Prompt, check_ids, encode_prompt
from llminfer.errors import GenerationFailed, LlminferError, UsageError
from llminfer.events import DraftCache, Event, Finished, FinishReason, Started, Step
from llminfer.params import (
    DEFAULT_KV_BITS,
    SAMPLER_FIELDS,
    CacheOptions,
    SamplingParams,
    Speculation,
    StopCriteria,
)
from llminfer.text import reason_of


def generate(
    loaded: LoadedModel,
    text: str,
    *,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    bad_words: Sequence[str] = (),
    stop: StopCriteria | None = None,
    system: str | None = None,
    raw: bool = False,
    cache: str | CacheOptions | None = None,
    speculation: Speculation | None = None,
    draft: LoadedModel | None = None,
) -> Generator[Event, None, None]:
    """Continue `text`, event by event: one `Started`, a `Step` per token, one `Finished`.

    Args:
        sampling: all values, or some by name; those missing come from the model.
        bad_words: texts that are never completed, besides the ids that `sampling` names.
        stop: when to end; 256 tokens when not given.
        system: a system message, for chat models.
        raw: leave the chat template out.
        cache: which cache, how it is filled and kept; a kind alone stands for `CacheOptions` of that kind,
            and a compiled model has a static one when not given, others a dynamic one.
        speculation: draft several tokens and check them in one forward; the tokens stay the same.
        draft: the model that drafts, for speculation of that kind.

    Raises:
        UsageError: before the first event, for a prompt that is empty or longer than the context, or a
            draft model with another vocabulary.
        ModelNotAvailable: before the first event, for a prompt with ids that the model does not embed.
        InvalidParams: before the first event, for a value out of its range.
        UnsupportedArchitecture: before the first event, for a cache that the model cannot have.
        PromptCacheMismatch: before the first event, for a file that is damaged or of another model.
    """
    options = cache if isinstance(cache, CacheOptions) else CacheOptions(kind=cache or loaded.execution.default_cache)
    loaded.execution.check_cache(options)
    check_cache(options, loaded.model.config, loaded.name, known=type(loaded.model))
    drafting = make_drafting(speculation, loaded, draft, options)
    stop = stop or StopCriteria()
    if isinstance(sampling, SamplingParams):
        sampling = {name: getattr(sampling, name) for name in SAMPLER_FIELDS}
    flags = with_bad_words(sampling or {}, loaded.tokenizer, bad_words)
    params, sampling_notes = effective_sampling(flags, loaded.generation_defaults)
    clock = Clock(synchronizer(loaded.device))
    prompt = encode_prompt(loaded.tokenizer, text, system=system, raw=raw)
    check_ids(prompt, loaded.tokenizer, loaded.model)
    tokenize_s = clock.lap()
    limit = token_limit(len(prompt.ids), stop.max_new_tokens, loaded.context_limit)
    room, compiled = len(prompt.ids) + max(limit[0] - 1, 0), None
    if loaded.execution.compiled:
        room = compiled_room(room)
        compiled = _compiled_once(loaded, room)
        clock.skip()
    forward = _make_forward(loaded, options, room, prompt.ids, compiled)
    feeding = Feeding(options=options, reused=len(forward.ids), room=room, drafting=drafting)
    started = make_started(loaded, prompt, params, stop, limit, feeding, tokenize_s, sampling_notes)
    if compiled is not None:
        started = replace(started, compile_s=compiled.compile_s, notes=(*started.notes, *compiled.notes))
    return _events(loaded, prompt, started, limit, clock, forward, feeding)


def run_prompt(
    loaded: LoadedModel,
    prompt: Prompt,
    *,
    sampling: SamplingParams,
    notes: tuple[str, ...],
    stop: StopCriteria,
    cache: str,
    clock: Clock,
    tokenize_s: float,
    forward: Forward,
    reused: int,
    drafting: Drafting | None = None,
) -> Generator[Event, None, None]:
    """The events of an encoded prompt, whose first `reused` tokens the forward's cache holds already.

    Raises:
        UsageError: before the first event, for a prompt longer than the context.
    """
    limit = token_limit(len(prompt.ids), stop.max_new_tokens, loaded.context_limit)
    feeding = Feeding(options=CacheOptions(kind=cache), reused=reused, drafting=drafting)
    started = make_started(loaded, prompt, sampling, stop, limit, feeding, tokenize_s, notes)
    return _events(loaded, prompt, started, limit, clock, forward, feeding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """What a run keeps, how many of its prompt's tokens it need not feed, and what drafts for it.

    `room` is for how many tokens there is a place; for those of the run when not given.
    """

    options: CacheOptions
    reused: int = 0
    room: int | None = None
    drafting: Drafting | None = None


def make_started(
    loaded: LoadedModel,
    prompt: Prompt,
    params: SamplingParams,
    stop: StopCriteria,
    limit: tuple[int, FinishReason],
    feeding: Feeding | str,
    tokenize_s: float,
    notes: tuple[str, ...],
) -> Started:
    """The record of what is about to run, with the cache it may come to hold."""
    if isinstance(feeding, str):
        feeding = Feeding(options=CacheOptions(kind=feeding))
    options = feeding.options
    at_limit = _fed(feeding, len(prompt.ids), limit, max(limit[0] - 1, 0))
    return Started(
        model=loaded.name,
        device=str(loaded.device),
        device_name=device_name(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if loaded.device.type == "cpu" else None,
        cache=options.name,
        kv_bits=(options.bits or DEFAULT_KV_BITS) if options.kind == "quantized" else None,
        kv_window=options.window,
        prefill_chunk=prefill_chunk(loaded.model, options),
        reused_tokens=feeding.reused,
        prompt_ids=prompt.ids,
        prompt_text=prompt.text,
        sampling=params,
        stop=effective_stop(stop, loaded.generation_defaults),
        eos_ids=tuple(sorted(loaded.eos_ids)),
        context_limit=loaded.context_limit,
        engine=loaded.execution.engine,
        weights=loaded.execution.weights_format,
        weights_bytes=loaded.weights_bytes,
        weights_parts=loaded.weights_parts,
        load_s=loaded.load_s,
        tokenize_s=tokenize_s,
        kv_at_limit=_predict(loaded, options, at_limit),
        kv_unpredicted="no cache is kept" if options.kind == "none" else loaded.kv_unpredicted,
        speculation=feeding.drafting.speculation if feeding.drafting else None,
        draft_model=feeding.drafting.draft.name if feeding.drafting and feeding.drafting.draft else None,
        draft_cost=feeding.drafting.draft_cost if feeding.drafting else None,
        notes=(*loaded.notes, *_unused_step(loaded, options), *notes, *prompt.notes),
    )


def _unused_step(loaded: LoadedModel, options: CacheOptions) -> tuple[str, ...]:
    if loaded.forward_factory is None or loaded.forward_factory_for(options) is not None:
        return ()
    return (f"the native step is not taken over a {options.name} cache: the matrices alone are native",)


def _events(
    loaded: LoadedModel,
    prompt: Prompt,
    started: Started,
    limit: tuple[int, FinishReason],
    clock: Clock,
    forward: Forward,
    feeding: Feeding,
) -> Generator[Event, None, None]:
    yield started
    output = make_output(loaded, started.stop, limit, clock)
    finished = yield from _decode(loaded, prompt, started, output, clock, forward, feeding)
    fed = _fed(feeding, len(prompt.ids), limit, max(output.count - 1, 0))
    error = None
    if finished.error:
        now = _predict(loaded, feeding.options, replace(fed, steps=output.count))
        error = explain(finished.error, output.count, loaded, started, now=now)
    if feeding.options.file is not None and error is None and limit[0]:
        try:
            save_prompt_cache(feeding.options.file, loaded, forward, feeding.options)
        except LlminferError as not_saved:
            if finished.reason == "interrupted":
                finished = replace(finished, notes=(*finished.notes, not_saved.message))
            else:
                error = not_saved
    kv = _predict(loaded, feeding.options, fed) if output.count else None
    yield replace(finished, error=error, kv=kv, draft_cache=_draft_cache(feeding.drafting))


def _decode(
    loaded: LoadedModel,
    prompt: Prompt,
    started: Started,
    output: Output,
    clock: Clock,
    forward: Forward,
    feeding: Feeding,
) -> Generator[Step, None, Finished]:
    """The loop of this run: token by token, or with drafts."""
    sample = make_sampler(started.sampling, prompt.ids, loaded.device, loaded.eos_ids)
    if feeding.drafting is None:
        new_ids = prompt.ids[feeding.reused :]
        return decode(forward, sample, output, clock, prompt_ids=new_ids, cached=feeding.reused)
    return decode_drafts(
        forward,
        feeding.drafting.drafter,
        sample,
        output,
        clock,
        prompt_ids=prompt.ids,
        cached=feeding.reused,
        draft_tokens=feeding.drafting.speculation.draft_tokens,
        exact_length=exact_length(loaded.model.config),
    )


def _draft_cache(drafting: Drafting | None) -> DraftCache | None:
    """What the draft model's own cache holds now that the run has ended."""
    if drafting is None or drafting.draft is None or drafting.drafter.forward is None:
        return None
    forward, draft = drafting.drafter.forward, drafting.draft
    tokens = len(forward.ids)
    if not tokens or not forward.crop(tokens) or forward.kv_bytes is None:
        return None
    return DraftCache(
        cached_tokens=tokens, kv_bytes=forward.kv_bytes, kv=predict(draft, tokens, draft.execution.default_cache)
    )


def _fed(feeding: Feeding, prompt_tokens: int, limit: tuple[int, FinishReason], steps: int) -> TokenSchedule:
    pieces = chunk_sizes(prompt_tokens - feeding.reused, feeding.options.prefill_chunk)
    room = feeding.room or prompt_tokens + max(limit[0] - 1, 0)
    return TokenSchedule(prompt=pieces, steps=steps, reused=feeding.reused, room=room)


def make_output(
    loaded: LoadedModel, stop: StopCriteria, limit: tuple[int, FinishReason], clock: Clock, began_s: float = 0.0
) -> Output:
    """What turns the ids of one run into text and ends it: EOS ids, stop texts, the limit, the time.

    `began_s` is when the run began on the clock.
    """
    max_time_s, tokenizer = stop.max_time_s, loaded.tokenizer
    return Output(
        detokenizer=make_detokenizer(tokenizer),
        matcher=StopMatcher(stop.stop),
        hidden_texts=_hidden_texts(tokenizer, stop.stop),
        eos_ids=frozenset() if stop.ignore_eos else loaded.eos_ids,
        max_new_tokens=limit[0],
        limit_reason=limit[1],
        reason=None if limit[0] else limit[1],
        token_text=lambda token_id: token_text(tokenizer, token_id),
        out_of_time=(lambda: False) if max_time_s is None else (lambda: clock.elapsed() - began_s >= max_time_s),
    )


def _hidden_texts(tokenizer: Any, stops: Sequence[str]) -> dict[int, str]:
    """The special tokens that a stop text names: they are not shown, and end a run all the same."""
    if not stops:
        return {}
    texts = {token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in special_token_ids(tokenizer)}
    return {token_id: text for token_id, text in texts.items() if text and any(text in stop for stop in stops)}


def _compiled_once(loaded: LoadedModel, room: int) -> CompiledStep:
    """The compiled step of a model for so many tokens, made and warmed up by the first run that needs it."""
    made = loaded.compiled_steps.get(room)
    if made is not None:
        return replace(made, compile_s=0.0)
    return loaded.compiled_steps.setdefault(room, compile_step(loaded.model, room))


@torch.inference_mode()  # a compiled step was made for tensors of this mode, and so are the loop's
def _make_forward(
    loaded: LoadedModel, options: CacheOptions, room: int, prompt_ids: Sequence[int], compiled: CompiledStep | None
) -> Forward:
    """A forward that holds what a saved cache has of the prompt, so that only the rest is to be fed."""
    saved = None
    if options.file is not None:
        saved = load_prompt_cache(options.file, loaded, options, max_tokens=room, prompt_ids=prompt_ids)
    cache, cached_ids = saved if saved is not None else (None, ())
    try:
        return make_forward(
            loaded.model,
            options=options,
            max_tokens=room,
            cache=cache,
            cached_ids=cached_ids,
            factory=partial(PlainForward, step=compiled.call)
            if compiled is not None
            else loaded.forward_factory_for(options),
        )
    except LlminferError:
        raise
    except Exception as error:
        raise GenerationFailed(f"cannot run {loaded.name}: {reason_of(error)}", hint="--debug shows where") from error


def token_text(tokenizer: Any, token_id: int) -> str:
    """A token's own text, special tokens included; a sentencepiece word keeps its leading space."""
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    token = tokenizer.convert_ids_to_tokens(token_id)
    return f" {text}" if token and token.startswith("▁") and not text.startswith(" ") else text


def token_limit(prompt_tokens: int, max_new_tokens: int, context: int | None) -> tuple[int, FinishReason]:
    """The most tokens to generate, and why no more.

    A model with a context of C is fed C tokens at most; the last one generated is not fed again,
    so prompt + generated − 1 ≤ C.
    """
    if context is None:
        return max_new_tokens, "length"
    if prompt_tokens > context:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens and the model's context is {context}", hint="shorten the prompt"
        )
    room = context - prompt_tokens + 1
    return (max_new_tokens, "length") if max_new_tokens <= room else (room, "context")
