"""What it means that our loop equals `generate()`: one model, every check, and a verdict for each.

The sweep over all architectures and the script that writes `docs/parity.md` share these checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from llminfer.engine.batch_loop import BatchLoad, Row, decode_batch
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
from llminfer.events import Finished, Step
from llminfer.kv.footprint import footprint
from llminfer.kv.layer import ModelKV
from llminfer.params import SamplingParams
from tests.tiny_models import VOCABULARY, WINDOW

SHORT, LONG = 5, 13  # tokens of a prompt inside the tiny models' window, and of one beyond it
NEW_TOKENS = 6  # enough for the short prompt to leave the window while decoding
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=7)
ROUNDING = 1e-4
# prompts of a batch and how much each may generate: two start together, the third takes the place of the first
BATCH_LENGTHS, BATCH_LIMITS, BATCH_SIZE = (SHORT, LONG, 3), (3, NEW_TOKENS, 5), 2
# types that transformers cannot run alone, or cannot run as language models
CANNOT_RUN = {
    "gemma3n": "its vision tower needs timm and Pillow; its language model is gemma3n_text",
    "gemma4_assistant": "a drafter that reads the cache of the model it drafts for",
    "gemma4_unified_assistant": "a drafter that reads the cache of the model it drafts for",
    "musicgen": "writes sound, four codes a step, and AutoModelForCausalLM cannot build it from its config",
    "musicgen_melody": "writes sound, four codes a step, and AutoModelForCausalLM cannot build it from its config",
}
_BY_CACHE_LENGTH = "takes its positions from the length of the cache, which is one number for all rows"
_INDEXED = "its indexer's cache has no way to hide padding"
# types whose rows are not decoded together, and why
ONE_AFTER_ANOTHER = {
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "moss_transcribe_diarize",
            "mvp", "pegasus", "plbart", "prophetnet", "roformer", "trocr", "whisper",
        ),
        _BY_CACHE_LENGTH,
    ),
    **dict.fromkeys(
        (
            "axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp",
            "qwen4_exp_text",
        ),
        _INDEXED,
    ),
    "blt": "wraps the cache in one of its own, with patches of different lengths",
    "cpmant": "puts a learned prefix before every prompt, and is fed the whole sequence at every step",
    "deepseek_v4": "its compressed entries stand for groups of tokens that padding would shift",
    "git": "reserves places for an image in the mask, even without one",
    "minimax": "keeps its states in a cache class of its own",
    "openai-gpt": "returns no cache",
    "recurrent_gemma": "keeps its states in its modules, for one sequence at a time",
    "reformer": "keeps buckets in a cache class of its own",
    "rwkv": "keeps its state under a name of its own",
    "xlm": "puts a mask token behind the newest one",
    "xlnet": "keeps memories under a name of its own",
    "xlstm": "keeps its state in a cache class of its own",
}  # fmt: skip
# image-text types outside the causal mapping whose tiny models build without a network: text is all they are given
IMAGE_TEXT_TYPES = (
    "aria", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_omni", "deepseek_vl", "ernie4_5_vl_moe",
    "exaone4_5", "glm_ocr", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "kimi_k25",
    "lfm2_vl", "lfm3_vl", "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr",
    "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mistral3", "mistral4", "ovis2", "paddleocr_vl", "paligemma",
    "qianfan_ocr", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "shieldgemma2", "smolvlm",
)  # fmt: skip
# its buckets change type when decoding passes the chunk's length, so a short prompt stays within it
_NO_CROSSING = frozenset({"reformer"})


class NoText:
    """A detokenizer for models without a vocabulary."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def new_tokens(model_type: str = "") -> tuple[int, int]:
    """Tokens to generate from the short prompt and from the long one."""
    return (WINDOW - SHORT if model_type in _NO_CROSSING else NEW_TOKENS), NEW_TOKENS // 2


def prepare_for_comparison(model: Any) -> None:
    """Let Reformer draw its hashes from a generator of their own.

    `generate()` samples from the generator that the hashes are drawn from, so its tokens depend on
    how many numbers they took.
    """
    if model.config.model_type != "reformer":
        return
    saved: list[torch.Tensor] = []

    def before(*_: Any) -> None:
        saved.append(torch.get_rng_state())
        torch.manual_seed(0)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(lambda *_: torch.set_rng_state(saved.pop()))


def output_of(limit: int) -> Output:
    """An output that only counts."""
    return Output(
        detokenizer=NoText(),
        matcher=StopMatcher(()),
        eos_ids=frozenset(),
        limit=TokenLimit(tokens=limit),
        token_text=str,
    )


def prompt_of(length: int) -> list[int]:
    """Ids that no special token has."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY - 8, (length,), generator=generator).tolist()


def expected_tokens(model: Any, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]:
    """What `model.generate()` appends to the prompt: ids, and their log-probabilities before any filter."""
    options: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        options = {"do_sample": True, **filters}
    wanted = GenerationConfig(
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    # its own defaults would otherwise fill what is left unset
    saved, model.generation_config = model.generation_config, GenerationConfig()
    ids = torch.tensor([prompt], device=model.device)
    torch.manual_seed(params.seed)
    try:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
    finally:
        model.generation_config = saved
    new = output.sequences[0, len(prompt) :].tolist()
    logprobs = [logits[0].float().log_softmax(dim=-1) for logits in output.logits]
    return [(token_id, float(row[token_id])) for token_id, row in zip(new, logprobs, strict=True)]


def our_steps(model: Any, prompt: Sequence[int], count: int, params: SamplingParams) -> list[Step]:
    """The steps of our own loop, its errors raised."""
    forward, sample = make_forward(model), make_sampler(params, prompt, model.device)
    torch.manual_seed(params.seed)
    running = decode(forward, sample, output_of(count), Clock(), prompt_ids=prompt)
    steps = []
    while True:
        try:
            steps.append(next(running))
        except StopIteration as end:
            finished: Finished = end.value
            if finished.error is not None:
                raise finished.error from None
            return steps


def assert_same(steps: Sequence[Step], expected: Sequence[tuple[int, float]], what: str) -> None:
    """The same ids, and log-probabilities that differ by rounding only.

    Ids alone would not do: a tiny random model often draws the same ones at wrong positions, too.
    """
    assert [step.token_id for step in steps] == [token_id for token_id, _ in expected], f"{what}: other tokens"
    for step, (_, logprob) in zip(steps, expected, strict=True):
        assert abs(step.logprob - logprob) < ROUNDING, f"{what}: step {step.index} is off by {step.logprob - logprob}"


def check_tokens(model: Any, params: SamplingParams, counts: Sequence[int]) -> None:
    """Our tokens are those of `generate()`, for a prompt within the window and one beyond it."""
    for length, count in zip((SHORT, LONG), counts, strict=True):
        prompt = prompt_of(length)
        theirs = expected_tokens(model, prompt, count, params)
        assert_same(our_steps(model, prompt, count, params), theirs, f"prompt of {length}")


def check_footprint(model: Any, kv: ModelKV, counts: Sequence[int]) -> None:
    """The bytes predicted are those that each step reports."""
    for length, count in zip((SHORT, LONG), counts, strict=True):
        for step in our_steps(model, prompt_of(length), count, GREEDY):
            predicted = footprint(kv, tokens=step.cached_tokens, dtype="float32").total_bytes
            assert step.kv_bytes == predicted or (step.kv_bytes is None and predicted == 0), step.cached_tokens


def check_batch(model: Any, params: SamplingParams) -> bool:
    """Rows that come and go beside each other get the tokens that each gets alone.

    Returns whether any step had several rows; models whose caches cannot be joined run one after another.
    """
    prompts = [prompt_of(length) for length in BATCH_LENGTHS]
    rows = [
        Row(key=key, prompt_ids=prompt, sample=make_sampler(params, prompt, model.device), output=output_of(limit))
        for key, (prompt, limit) in enumerate(zip(prompts, BATCH_LIMITS, strict=True))
    ]
    steps: dict[int, list[Step]] = {row.key: [] for row in rows}
    together = False
    for event in decode_batch(model, rows, Clock(), batch_size=BATCH_SIZE):
        if isinstance(event, BatchLoad):
            together = together or event.rows > 1
        elif isinstance(event[1], Step):
            steps[event[0]].append(event[1])
        elif event[1].error is not None:
            raise event[1].error
    for key, (prompt, limit) in enumerate(zip(prompts, BATCH_LIMITS, strict=True)):
        alone = [(step.token_id, step.logprob) for step in our_steps(model, prompt, limit, params)]
        assert_same(steps[key], alone, f"row {key}")
    return together
