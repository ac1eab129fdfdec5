"""Every row of a batch gets the tokens that it gets alone, whoever comes and goes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from llminfer.engine.batch_loop import BatchLoad, Row, decode_batch
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.loop import decode
from llminfer.engine.machine.clock import Clock
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.engine.text.output import Output, StopMatcher, TokenLimit
from llminfer.events import Finished, Step
from llminfer.kv.footprint import footprint
from llminfer.kv.rules.families import read_model
from llminfer.params import SamplingParams

VOCABULARY, WINDOW = 128, 8
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
GROUPED = {**COMMON, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    "gemma3_text": {**GROUPED, "num_hidden_layers": 4, "sliding_window": WINDOW},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "lfm2": {
        **COMMON,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "full_attn_idxs": [1],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {
        **GROUPED,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 0,
        "mlp_only_layers": [0, 1],
    },
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}
PROMPTS = [
    [5, 9, 77, 3, 20],
    [7],
    [11] * 13,
    [3, 4, 5],
    [99, 98, 97, 96, 95, 94, 93, 92, 91, 90, 89, 88, 87, 86],
    [6, 6],
]
LIMITS = [4, 19, 9, 1, 6, 14]


class NoText:
    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def output_of(limit: int, eos: frozenset[int] = frozenset()) -> Output:
    return Output(
        detokenizer=NoText(),
        matcher=StopMatcher(()),
        eos_ids=eos,
        limit=TokenLimit(tokens=limit),
        token_text=str,
    )


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **CONFIGS[request.param])
    return AutoModelForCausalLM.from_config(config).eval()


def params_of(number: int, sampled: bool) -> SamplingParams:
    if not sampled:
        return SamplingParams(temperature=0)
    return SamplingParams(temperature=0.9, top_k=30, repetition_penalty=1.2, seed=number)


def rows_of(model: Any, sampled: bool) -> list[Row]:
    return [
        Row(
            key=number,
            prompt_ids=prompt,
            sample=make_sampler(params_of(number, sampled), prompt, model.device),
            output=output_of(limit),
        )
        for number, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]


def alone(model: Any, prompt: Sequence[int], limit: int, params: SamplingParams) -> list[int]:
    forward, sample = make_forward(model), make_sampler(params, prompt, model.device)
    return [step.token_id for step in decode(forward, sample, output_of(limit), Clock(), prompt_ids=prompt)]


def collect(events: Any) -> tuple[dict[int, list[int]], dict[int, Finished], list[BatchLoad]]:
    ids: dict[int, list[int]] = {}
    finished: dict[int, Finished] = {}
    loads = []
    for event in events:
        if isinstance(event, BatchLoad):
            loads.append(event)
        elif isinstance(event[1], Step):
            assert event[1].index == len(ids.setdefault(event[0], []))
            ids[event[0]].append(event[1].token_id)
        else:
            finished[event[0]] = event[1]
    return ids, finished, loads


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 6])
def test_rows_that_come_and_go_get_the_tokens_they_get_alone(model: Any, sampled: bool, batch_size: int) -> None:
    ids, finished, _ = collect(decode_batch(model, rows_of(model, sampled), Clock(), batch_size=batch_size))
    for number, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        assert ids[number] == alone(model, prompt, limit, params_of(number, sampled)), number
        assert finished[number].reason == "length"


def test_a_left_padded_batch_of_generate_agrees(model: Any) -> None:
    if model.config.model_type in {"mamba", "lfm2", "qwen3_next"}:
        limit, prompts = 6, [PROMPTS[0], PROMPTS[0]]  # padding a recurrent prefill is not what our rows do
    else:
        limit, prompts = 6, PROMPTS[:4]
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    expected = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=limit)[:, width:].tolist()
    rows = [
        Row(
            key=number,
            prompt_ids=prompt,
            sample=make_sampler(SamplingParams(temperature=0), prompt, model.device),
            output=output_of(limit),
        )
        for number, prompt in enumerate(prompts)
    ]
    ids, _, _ = collect(decode_batch(model, rows, Clock(), batch_size=len(rows)))
    assert [ids[number] for number in range(len(rows))] == expected


def test_the_joined_cache_weighs_what_a_batch_is_predicted_to(model: Any) -> None:
    _, _, loads = collect(decode_batch(model, rows_of(model, False), Clock(), batch_size=6))
    assert max(load.rows for load in loads) > 1
    kv = read_model(model.config.to_dict(), source="tiny")
    for load in loads:
        assert load.kv_bytes == footprint(kv, tokens=load.tokens, batch=load.rows, dtype="float32").total_bytes
    # padding goes when its row goes: the cache is never longer than its longest row
    assert loads[-1].tokens <= max(len(p) + n for p, n in zip(PROMPTS, LIMITS, strict=True))


def test_samples_of_one_prompt_share_its_prefill_and_differ(model: Any) -> None:
    prompt, limit = PROMPTS[0], 8
    rows = [
        Row(
            key=number,
            prompt_ids=prompt,
            sample=make_sampler(SamplingParams(seed=40 + number), prompt, model.device),
            output=output_of(limit),
        )
        for number in range(4)
    ]
    ids, _, _ = collect(decode_batch(model, rows, Clock(), batch_size=4))
    for number in range(4):
        assert ids[number] == alone(model, prompt, limit, SamplingParams(seed=40 + number))
    assert len({tuple(row) for row in ids.values()}) > 1


def test_an_interrupt_ends_the_rows_that_have_started(model: Any) -> None:
    events = decode_batch(model, rows_of(model, False), Clock(), batch_size=2)
    seen = [next(events) for _ in range(3)]
    ended = [event for event in (events.throw(KeyboardInterrupt()), *events) if isinstance(event, tuple)]
    started = {event[0] for event in seen if isinstance(event, tuple)}
    assert {key for key, _ in ended} == started - {
        e[0] for e in seen if isinstance(e, tuple) and isinstance(e[1], Finished)
    }
    assert all(event.reason == "interrupted" for _, event in ended)


def test_a_row_that_breaks_does_not_take_the_others_along(model: Any) -> None:
    rows = rows_of(model, False)

    def broken(logits: torch.Tensor) -> Any:
        raise RuntimeError("boom")

    rows[1].sample = broken
    ids, finished, _ = collect(decode_batch(model, rows, Clock(), batch_size=6))
    assert finished[1].reason == "error"
    assert ids[0] == alone(model, PROMPTS[0], LIMITS[0], params_of(0, False))
