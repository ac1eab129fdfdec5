"""From a request to a run that is ready for its loop: for single runs, samples, batches and conversations alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from llminfer.engine.forward.chunks import prefill_chunk
from llminfer.engine.forward.protocol import Forward
from llminfer.engine.kv_cache.kinds import TokenSchedule, chunk_sizes
from llminfer.engine.machine.clock import Clock
from llminfer.engine.machine.device import device_name, synchronizer
from llminfer.engine.model import LoadedModel
from llminfer.engine.models.protocols import CausalLM
from llminfer.engine.prediction import predict_run
from llminfer.engine.sampling.resolve import effective_sampling, effective_stop
from llminfer.engine.sampling.sampler import Sampler, make_sampler
from llminfer.engine.speculative_loop import Drafting
from llminfer.engine.text.output import Output, TokenLimit, make_output, token_limit
from llminfer.engine.text.prompt import Prompt, check_ids, encode_bad_words, encode_messages, encode_prompt
from llminfer.events import Started
from llminfer.kv.footprint import Footprint
from llminfer.params import DEFAULT_KV_BITS, CacheOptions, SamplingParams, StopCriteria
from llminfer.request import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenForward:
    """A forward that holds what is cached of a prompt already; its cache has `room` for so many tokens, or the run's.

    `compile_s` is what compiling took, None when nothing was to be compiled.
    """

    forward: Forward
    room: int | None = None
    compile_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that is ready for its loop; it began at `began_s` on the clock, which a batch shares.

    `at_limit` is what will have been fed at the limit, `opened` None in a batch, whose rows are fed together.
    """

    loaded: LoadedModel
    started: Started
    options: CacheOptions
    limit: TokenLimit
    at_limit: TokenSchedule
    clock: Clock
    began_s: float
    opened: OpenForward | None
    drafting: Drafting | None

    def make_sampler(self) -> Sampler:
        """What draws its tokens; it has a random generator and counts of its own."""
        started, loaded = self.started, self.loaded
        return make_sampler(started.sampling, started.prompt_ids, loaded.device, loaded.eos_ids)

    def make_output(self) -> Output:
        """What turns its ids into text, and ends it."""
        loaded, stop = self.loaded, self.started.stop
        return make_output(loaded.tokenizer, stop, self.limit, self.clock, eos_ids=loaded.eos_ids, began_s=self.began_s)

    def predict(self, steps: int) -> Footprint | None:
        """The cache after the prompt and so many tokens more, None when it cannot be predicted."""
        return predict_run(self.loaded, self.options, replace(self.at_limit, steps=steps))


def prepare_run(
    loaded: LoadedModel,
    request: GenerationRequest,
    *,
    clock: Clock | None = None,
    open_forward: Callable[[Prompt, TokenLimit, Clock], OpenForward] | None = None,
    drafting: Drafting | None = None,
) -> PreparedRun:
    """Resolve the sampling, encode the prompt, find the limit, open the forward, and say what is about to run.

    Args:
        clock: of the batch that the run is a row of; one of its own when None, which starts with tokenizing.
        open_forward: gives the forward for a prompt; None for a row of a batch.

    Raises:
        As `llminfer.generate`, and whatever `open_forward` does.
    """
    options = request.cache_for(loaded.execution)
    bad_words = encode_bad_words(loaded.tokenizer, request.sampling.bad_texts)
    sampling, notes = effective_sampling(request.sampling, loaded.generation_defaults, bad_words)
    stop = effective_stop(request.stop, loaded.generation_defaults)
    clock = clock or Clock(synchronizer(loaded.device))
    clock.lap()
    began_s = clock.elapsed()
    prompt = _encode(loaded, request)
    tokenize_s = clock.lap()
    conversation = request.messages is not None
    limit = token_limit(len(prompt.ids), stop.max_new_tokens, loaded.context_limit, conversation=conversation)
    opened = open_forward(prompt, limit, clock) if open_forward is not None else None
    reused, steps = len(opened.forward.ids) if opened else 0, max(limit.tokens - 1, 0)
    at_limit = TokenSchedule(
        prompt=chunk_sizes(len(prompt.ids) - reused, options.prefill_chunk),
        steps=steps,
        reused=reused,
        room=(opened and opened.room) or len(prompt.ids) + steps,
    )
    started = replace(
        _started(loaded, prompt, sampling, stop, options),
        reused_tokens=reused,
        tokenize_s=tokenize_s,
        compile_s=opened.compile_s if opened else None,
        kv_at_limit=predict_run(loaded, options, at_limit),
        speculation=drafting.speculation if drafting else None,
        draft_model=drafting.draft.name if drafting and drafting.draft else None,
        draft_cost=drafting.draft_cost if drafting else None,
        notes=(*loaded.notes, *_unused_step(loaded, options), *notes, *prompt.notes, *(opened.notes if opened else ())),
    )
    return PreparedRun(
        loaded=loaded,
        started=started,
        options=options,
        limit=limit,
        at_limit=at_limit,
        clock=clock,
        began_s=began_s,
        opened=opened,
        drafting=drafting,
    )


def _started(
    loaded: LoadedModel, prompt: Prompt, sampling: SamplingParams, stop: StopCriteria, options: CacheOptions
) -> Started:
    """What is known of a run before its forward is opened."""
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
        prompt_ids=prompt.ids,
        prompt_text=prompt.text,
        sampling=sampling,
        stop=stop,
        eos_ids=tuple(sorted(loaded.eos_ids)),
        context_limit=loaded.context_limit,
        engine=loaded.execution.engine,
        weights=loaded.execution.weights_format,
        weights_bytes=loaded.weights_bytes,
        weights_parts=loaded.weights_parts,
        startup_s=loaded.startup_s,
        load_s=loaded.load_s,
        tokenize_s=0.0,
        kv_at_limit=None,
        kv_unpredicted="no cache is kept" if options.kind == "none" else loaded.kv_unpredicted,
    )


def _encode(loaded: LoadedModel, request: GenerationRequest) -> Prompt:
    if request.messages is None:
        prompt = encode_prompt(loaded.tokenizer, request.text, system=request.system, raw=request.raw)
    else:
        prompt = encode_messages(loaded.tokenizer, request.messages)
    return check_ids(prompt, loaded.tokenizer, _embedded(loaded.model))


def _embedded(model: CausalLM) -> int | None:
    """How many ids the model embeds, None when it does not say."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
    return int(weight.shape[0]) if weight.dim() == 2 else None


def _unused_step(loaded: LoadedModel, options: CacheOptions) -> tuple[str, ...]:
    if loaded.forward_factory is None or loaded.forward_factory_for(options) is not None:
        return ()
    return (f"the native step is not taken over a {options.name} cache: the matrices alone are native",)
