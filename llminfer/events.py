"""What a run says, event by event, and `Trace`, the fold over the events.

All times are seconds of one monotonic clock that starts when tokenizing starts; the device is
synchronised before the clock is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llminfer.kv.footprint import Footprint
from llminfer.params import SamplingParams, Speculation, StopCriteria

FinishReason = Literal["eos", "stop", "length", "context", "time", "interrupted", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The run is about to do its first forward.

    `weights` is the format that linear layers were packed in, None for those of the checkpoint, and
    `weights_bytes` what the whole model holds, by part in `weights_parts`.
    `kv_at_limit` is the predicted cache of prompt + max_new_tokens, None when the model's cache
    cannot be predicted or none is kept; `kv_unpredicted` then says why. `reused_tokens` of the
    prompt were in the cache before the run, and the others are fed `prefill_chunk` at a time.
    `draft_cost` is a forward of the draft model over one token, in forwards of the model.
    `startup_s` is what came before the run by name (`import`, `convert`, `load`), in seconds; `compile_s`
    too went by before the run's clock started, None when nothing was to be compiled.
    """

    model: str
    device: str
    device_name: str
    dtype: str
    threads: int | None
    cache: str
    prompt_ids: tuple[int, ...]
    prompt_text: str
    sampling: SamplingParams
    stop: StopCriteria
    eos_ids: tuple[int, ...]
    context_limit: int | None
    load_s: float
    tokenize_s: float
    kv_at_limit: Footprint | None
    kv_unpredicted: str | None = None
    kv_bits: int | None = None
    kv_window: int | None = None
    prefill_chunk: int | None = None
    reused_tokens: int = 0
    speculation: Speculation | None = None
    draft_model: str | None = None
    draft_cost: float | None = None
    engine: str = "transformers"
    weights: str | None = None
    weights_bytes: int | None = None
    weights_parts: Mapping[str, int] | None = None
    startup_s: Mapping[str, float] = field(default_factory=dict)
    compile_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One token.

    With speculation one forward may give several: the first of them carries its `forward_s` and what
    was drafted for it, the others have `shared_forward`. All of them are yielded once the cache is cut
    back to what was accepted, so their `cached_tokens` and `kv_bytes` are the same.

    Attributes:
        index: 0 for the first generated token, whose forward is the prefill.
        token_text: the token's own text, special tokens included.
        text: the text that became final with this token; held text comes with a later one.
        logprob: natural logarithm of the token's probability under the model's own distribution,
            before temperature and filters.
        top_logprobs: the most likely ids with their log-probabilities, as many as were asked for.
        output_s: time the reader of the events spent since the event before.
        at_s: when the step was complete.
        cached_tokens: tokens of the sequence that are in the cache: prompt + index of the forward's last token.
        kv_bytes: bytes of all tensors in the cache, None without one.
        draft_s: time that drafting took, and cutting back what was not accepted of the draft before.
        drafted: ids that were drafted for this step's forward.
        accepted: how many of them, from the first on, were the ids drawn.
        shared_forward: the logits came from the forward of a step before.
    """

    index: int
    token_id: int
    token_text: str
    text: str
    logprob: float
    output_s: float
    forward_s: float
    sampling_s: float
    text_s: float
    at_s: float
    cached_tokens: int
    kv_bytes: int | None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    draft_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    shared_forward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCache:
    """What a draft model's own cache held at the end; `kv` is its prediction, None when there is none."""

    cached_tokens: int
    kv_bytes: int
    kv: Footprint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run has ended; `text` is what was still held back.

    `detail` is the EOS id or the stop text. `error` is set when `reason` is `error`, and when a whole
    run could not be saved as was asked.
    `kv` is the predicted cache of the `cached_tokens` that were cached after the last whole step.
    """

    reason: FinishReason
    text: str = ""
    detail: int | str | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    kv: Footprint | None = None
    draft_cache: DraftCache | None = None
    notes: tuple[str, ...] = ()


Event = Started | Step | Finished


@dataclass(slots=True, kw_only=True)
class Trace:
    """Everything a run has said so far, and the figures that follow from it."""

    started: Started | None = None
    steps: list[Step] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Take one more event in."""
        match event:
            case Started():
                self.started = event
            case Step():
                self.steps.append(event)
            case Finished():
                self.finished = event

    @property
    def text(self) -> str:
        """All text of the run: what `tokenizer.decode` gives for its ids, cut at a stop text."""
        return "".join(step.text for step in self.steps) + (self.finished.text if self.finished else "")

    @property
    def token_ids(self) -> list[int]:
        """All generated ids, an EOS included."""
        return [step.token_id for step in self.steps]

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from the start of tokenizing until the first token's text is there."""
        return self.steps[0].at_s if self.steps else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the n − 1 gaps between tokens, output included."""
        return [after.at_s - before.at_s for before, after in zip(self.steps, self.steps[1:], strict=False)]

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last, None with fewer than two."""
        return self.steps[-1].at_s - self.steps[0].at_s if len(self.steps) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: (last − first) / (n − 1)."""
        return None if self.decode_s is None else self.decode_s / (len(self.steps) - 1)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The inverse of the time per output token; the prefill is no part of it."""
        return 1 / self.tpot_s if self.tpot_s else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that were fed, over the time they took."""
        if not self.steps or self.started is None or not self.steps[0].forward_s:
            return None
        return (len(self.started.prompt_ids) - self.started.reused_tokens) / self.steps[0].forward_s

    @property
    def drafted(self) -> int:
        """Ids drafted in all."""
        return sum(step.drafted for step in self.steps)

    @property
    def accepted(self) -> int:
        """Drafted ids that were the ids drawn."""
        return sum(step.accepted for step in self.steps)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted, None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def decode_forwards(self) -> int:
        """Forwards after the prefill whose tokens were drawn."""
        return sum(not step.shared_forward for step in self.steps[1:])

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens after the first ÷ forwards after the prefill; 1 without speculation."""
        return (len(self.steps) - 1) / self.decode_forwards if self.decode_forwards else None

    def decode_parts_s(self) -> Mapping[str, float]:
        """Where the decode time went, from the first token to the last; the parts add up to `decode_s`."""
        steps = self.steps[1:]
        parts = {
            "forward": sum(step.forward_s for step in steps),
            "sampling": sum(step.sampling_s for step in steps),
            "text": sum(step.text_s for step in steps),
            "output": sum(step.output_s for step in steps),
        }
        if self.started is not None and self.started.speculation is not None:
            parts = {"draft": sum(step.draft_s for step in steps), **parts}
        return {**parts, "unaccounted": (self.decode_s or 0.0) - sum(parts.values())}


def percentile(values: list[float], percent: float) -> float | None:
    """The `percent`-th percentile, linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
