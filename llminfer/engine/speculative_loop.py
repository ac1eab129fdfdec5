"""The loop with drafts: guess several ids, run the model over all of them at once, keep those it draws itself.

Every id is drawn by the run's own sampler from the model's own logits, as `decode` does. A draft only
decides how many positions one forward computes: as long as the id drawn is the one drafted, the next
position's logits are those that a forward of its own would give, so the next id is drawn from them.
The first id that differs is kept, and the cache is cut back to what came before it. So the tokens are
those of the run without drafts, greedy and sampled, whatever was drafted.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llminfer.engine.forward.cache_reuse import common_prefix, exact_length
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.forward.protocol import Forward
from llminfer.engine.kv_cache.tensors import keep_past
from llminfer.engine.machine.clock import Clock
from llminfer.engine.models.capabilities import text_config
from llminfer.engine.records import Drawn, draw_token, make_finished, make_step
from llminfer.engine.sampling.sampler import Sampler
from llminfer.engine.speculation.checks import check_speculation, check_vocabularies
from llminfer.engine.speculation.drafters import Drafter, DraftModel, PromptLookup, check_cost, relative_cost
from llminfer.engine.text.output import Output
from llminfer.errors import GenerationFailed, UsageError
from llminfer.events import Finished, Step
from llminfer.params import CacheOptions, Speculation

if TYPE_CHECKING:
    from llminfer.engine.model import LoadedModel


@dataclass(slots=True, kw_only=True)
class _Round:
    """One forward: what was drafted for it, what was drawn from it (`first` is its first step), what each part took."""

    first: int
    output_s: float
    drafted: Sequence[int] = ()
    drawn: list[Drawn] = field(default_factory=list)
    draft_s: float = 0.0
    forward_s: float = 0.0

    @property
    def accepted(self) -> int:
        """Drafted ids that were the ids drawn."""
        return common_prefix(self.drafted, [token.token_id for token in self.drawn])


@torch.inference_mode()
def decode_drafts(
    forward: Forward,
    draft: Drafter,
    sample: Sampler,
    output: Output,
    clock: Clock,
    *,
    prompt_ids: Sequence[int],
    cached: int = 0,
    draft_tokens: int,
    exact_length: int | None = None,
) -> Generator[Step, None, Finished]:
    """Yield a `Step` for each token, those of one forward right after one another, and return a `Finished`.

    `prompt_ids` are all of them, of which the forward has the first `cached` already. No draft is longer
    than `draft_tokens`, or reaches beyond `exact_length`, from where on a forward over several ids gives
    other logits than one after the other. An interrupt at a yield comes after what was drawn already.
    """
    ids, undo_s = list(prompt_ids), 0.0
    # the most that may be fed: the run's last token is not
    reach = min(len(ids) + output.limit.tokens - 1, exact_length or sys.maxsize)
    broken: BaseException | None = None
    try:
        while output.reason is None and broken is None:
            this = _Round(first=len(ids) - len(prompt_ids), output_s=clock.lap())
            most = min(draft_tokens, reach - len(ids)) if this.first else 0  # the prompt goes alone
            broken = _forward_and_draw(this, forward, draft, sample, output, clock, ids, most)
            this.draft_s += undo_s
            ids += [token.token_id for token in this.drawn]
            if len(ids) > len(prompt_ids) and not forward.crop(len(ids) - 1):  # the newest token is not cached
                broken = broken or GenerationFailed("the cache cannot be cut back to what was accepted")
            undo_s = clock.lap()
            steps = [*_steps(this, output, len(ids) - 1, forward.kv_bytes)]
            clock.lap()  # making the records is in no part of a step, so it shows as unaccounted
            for step in steps:
                try:
                    yield step
                except KeyboardInterrupt as interrupt:  # what was drawn with this one still comes
                    broken = broken or interrupt
            if not this.first:
                keep_past(forward.cache, True)
    except (KeyboardInterrupt, Exception) as exception:
        broken = exception
    finally:
        keep_past(forward.cache, False)
    notes = (*forward.notes, *draft.notes)
    if exact_length is not None and len(ids) > exact_length:
        why = "this model's keys depend on the length, so nothing was drafted there"
        notes = (*notes, f"beyond {exact_length} tokens {why}")
    cached_tokens = len(ids) - 1 if len(ids) > len(prompt_ids) else cached
    return make_finished(output, broken, cached_tokens=cached_tokens, notes=notes)


def _forward_and_draw(
    this: _Round,
    forward: Forward,
    draft: Drafter,
    sample: Sampler,
    output: Output,
    clock: Clock,
    ids: Sequence[int],
    most: int,
) -> BaseException | None:
    """Draft, feed and draw; what broke it comes back, so that what was drawn before is not lost."""
    try:
        this.drafted = draft(ids, most) if most > 0 else ()
        this.draft_s = clock.lap()
        # after the newest id and each drafted one
        new_ids = [*ids[len(forward.ids) :], *this.drafted]
        logits = forward.last(new_ids, len(this.drafted) + 1) if this.drafted else forward(new_ids)
        this.forward_s = clock.lap()
        _draw_while_agreed(this, logits, sample, output, clock)
    except (KeyboardInterrupt, Exception) as exception:
        return exception
    return None


def _draw_while_agreed(this: _Round, logits: Tensor, sample: Sampler, output: Output, clock: Clock) -> None:
    """Draw from one position after the other, until the run ends or an id is not the one drafted."""
    for place in range(len(logits)):
        drawn = draw_token(logits[place : place + 1], sample, output, clock)
        this.drawn.append(drawn)
        if output.reason is not None or drawn.token_id not in this.drafted[place : place + 1]:
            return


def _steps(this: _Round, output: Output, cached_tokens: int, kv_bytes: int | None) -> Iterator[Step]:
    """The records of what one forward gave: the first carries what the forward took."""
    for place, drawn in enumerate(this.drawn):
        index = this.first + place
        if place:
            yield make_step(
                drawn, output, index=index, cached_tokens=cached_tokens, kv_bytes=kv_bytes, shared_forward=True
            )
            continue
        yield make_step(
            drawn,
            output,
            index=index,
            cached_tokens=cached_tokens,
            kv_bytes=kv_bytes,
            output_s=this.output_s,
            forward_s=this.forward_s,
            draft_s=this.draft_s,
            drafted=len(this.drafted),
            accepted=this.accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What drafts for a run; `draft` is the model that does, None where the text itself does.

    `draft_cost` is a forward of that model, in forwards of the one that checks.
    """

    speculation: Speculation
    drafter: Drafter
    draft: LoadedModel | None = None
    draft_cost: float | None = None


def make_drafting(
    speculation: Speculation | None, loaded: LoadedModel, draft: LoadedModel | None, options: CacheOptions
) -> Drafting | None:
    """What drafts for a run of this model, None without speculation.

    Raises:
        UsageError: for a draft model that is missing, or not asked for, or has another vocabulary.
        UnsupportedArchitecture: for a model whose cache cannot be cut back.
    """
    wanted = speculation is not None and speculation.kind == "draft-model"
    if wanted != (draft is not None):
        raise UsageError("a draft model and speculation of the kind `draft-model` need each other", hint="give both")
    if speculation is None:
        return None
    check_speculation(speculation, options, loaded.model.config, loaded.name)
    check = check_cost(loaded.device.type)
    if draft is None:
        return Drafting(speculation=speculation, drafter=PromptLookup(check))
    check_speculation(speculation, CacheOptions(), draft.model.config, draft.name)
    check_vocabularies(draft.tokenizer, loaded.tokenizer, draft_name=draft.name, source=loaded.name)
    cost, drafts = relative_cost(draft.model, loaded.model), CacheOptions(kind=draft.execution.default_cache)
    lengths = (draft.context_limit, exact_length(draft.model.config))
    drafter = DraftModel(
        make_forward(draft.model, options=drafts, factory=draft.forward_factory_for(drafts)),
        vocabulary=min(text_config(model.config).vocab_size for model in (draft.model, loaded.model)),
        longest=min((length for length in lengths if length is not None), default=None),
        cost=cost,
        check=check,
    )
    return Drafting(speculation=speculation, drafter=drafter, draft=draft, draft_cost=cost)
