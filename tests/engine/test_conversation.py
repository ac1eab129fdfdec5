"""A kept cache changes what a turn costs, never what it answers."""

from __future__ import annotations

import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.conversation import Conversation
from llminfer.engine.forward.cache_reuse import FeedMode, choose_feed_mode, exact_length
from llminfer.engine.forward.forward import make_forward
from llminfer.engine.load import load
from llminfer.engine.model import LoadedModel
from llminfer.errors import UsageError
from llminfer.events import Finished, Started, Step, Trace
from llminfer.params import StopCriteria
from llminfer.transcript import Message, Transcript, read_transcript, write_transcript
from tests.engine.test_parity import reference_ids
from tests.tiny_checkpoints import CHAT_TEMPLATE, byte_level_tokenizer, save_tiny_checkpoint

WINDOW = 16
GREEDY = {"temperature": 0}
TURNS = ("Hello, who is there?", "And why?", "Tell me more about it.", "Bye")
VOCABULARY = 259

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": WINDOW},
    "gemma3_text": {**_SIZES, "num_hidden_layers": 6, "sliding_window": WINDOW},
    "phi3": {**_SIZES, "pad_token_id": 0, "sliding_window": WINDOW},
    "lfm2": {**_SIZES, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **_SIZES,
        **_LINEAR,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    # keeps its state in the modules
    "recurrent_gemma": {
        **_SIZES,
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0},
}
# a template that shows only the beginning of earlier answers
REWRITING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}", "{{ message['content'] if message['role'] == 'user' else message['content'][:3] }}"
)
# these go on from their caches and cannot take a token back once it is beyond the window, or at all
CANNOT_CROP = ("mistral", "gemma3_text", "phi3", "lfm2", "qwen3_next", "recurrent_gemma", "mamba")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads a tiny model of a type, once, with a chat template; it answers in letters unless told otherwise."""
    made: dict[tuple[str, str, bool], LoadedModel] = {}

    def make(model_type: str, template: str = CHAT_TEMPLATE, *, letters: bool = True) -> LoadedModel:
        key = (model_type, template, letters)
        if key not in made:
            config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
            folder = tmp_path_factory.mktemp(model_type)
            save_tiny_checkpoint(folder, config, tokenizer=byte_level_tokenizer(chat_template=template))
            made[key] = load(inspect_checkpoint(folder), dtype="float32", device="cpu")
            if letters:
                answer_in_letters(made[key])
        return made[key]

    return make


def answer_in_letters(loaded: LoadedModel) -> None:
    """Let only letters have a chance, whose text is encoded again as it was drawn."""
    letters = {loaded.tokenizer.convert_tokens_to_ids(letter) for letter in string.ascii_letters}
    others = torch.tensor([token_id not in letters for token_id in range(VOCABULARY)])
    loaded.model.get_output_embeddings().register_forward_hook(
        lambda module, arguments, logits: logits.masked_fill(others, -1e4)
    )


def turn(conversation: Conversation, text: str, *, cut_after: int | None = None) -> Trace:
    """One turn, its answer interrupted after so many tokens when asked for."""
    trace = Trace()
    events = conversation.ask(text)
    event = next(events)
    while event is not None:
        trace.add(event)
        cut = isinstance(event, Step) and len(trace.steps) == cut_after
        event = events.throw(KeyboardInterrupt()) if cut else next(events, None)
    return trace


def check(loaded: LoadedModel, trace: Trace, before: tuple[Message, ...], text: str) -> Started:
    """The prompt is the whole conversation's, and the tokens and bytes are those of a run from the beginning."""
    started, finished = trace.started, trace.finished
    assert started is not None
    assert isinstance(finished, Finished)
    messages = [*({"role": m.role, "content": m.content} for m in before), {"role": "user", "content": text}]
    ids = loaded.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(started.prompt_ids) == list(ids)
    assert trace.token_ids == reference_ids(loaded.model, list(ids), len(trace.steps))
    assert [step.cached_tokens for step in trace.steps] == [len(ids) + i for i in range(len(trace.steps))]
    if finished.kv is not None:
        assert finished.kv.tokens == trace.steps[-1].cached_tokens
        assert finished.kv.total_bytes == trace.steps[-1].kv_bytes
    return started


def talk(loaded: LoadedModel, turns: tuple[str, ...] = TURNS, *, tokens: int = 12) -> list[Started]:
    conversation = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=tokens))
    starts = []
    for text in turns:
        before = conversation.messages
        trace = turn(conversation, text)
        starts.append(check(loaded, trace, before, text))
        assert conversation.messages == (
            *before,
            Message(role="user", content=text),
            Message(role="assistant", content=trace.text),
        )
    return starts


# Tiny models


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_turn_answers_as_a_run_from_the_beginning(tiny: Any, model_type: str) -> None:
    starts = talk(tiny(model_type))
    # each prompt and its answer begin the next one, but for the newest token
    assert [start.reused_tokens for start in starts] == [0, *(len(start.prompt_ids) + 11 for start in starts[:-1])]
    assert not any(start.notes for start in starts)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3_next"])
def test_an_answer_that_is_encoded_differently_from_how_it_was_drawn(tiny: Any, model_type: str) -> None:
    # random bytes are mostly no text, so the next turn spells them in another way
    starts = talk(tiny(model_type, letters=False))
    assert all(after.reused_tokens < len(before.prompt_ids) + 11 for before, after in pairwise(starts))


def test_only_what_is_new_is_fed(tiny: Any) -> None:
    loaded = tiny("llama")
    conversation = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=5))
    conversation.restart([Message(role="user", content="x"), Message(role="assistant", content="y" * 100)])
    first = turn(conversation, "again").started
    fed: list[int] = []
    forward = conversation._forward
    assert first is not None
    assert forward is not None
    model_forward = forward._forward

    class Counting:
        def __call__(self, new_ids: Any) -> Any:
            fed.append(len(new_ids))
            return model_forward(new_ids)

        def __getattr__(self, name: str) -> Any:
            return getattr(model_forward, name)

    forward._forward = Counting()  # type: ignore[assignment]
    trace = turn(conversation, "more")
    assert trace.started is not None
    assert trace.started.reused_tokens >= len(first.prompt_ids)
    assert fed == [len(trace.started.prompt_ids) - trace.started.reused_tokens, 1, 1, 1, 1]
    assert trace.prefill_tokens_per_s == pytest.approx(fed[0] / trace.steps[0].forward_s)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_an_interrupted_answer_stays_as_far_as_it_went(tiny: Any, model_type: str) -> None:
    loaded = tiny(model_type)
    conversation = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=12))
    cut = turn(conversation, TURNS[0], cut_after=4)
    assert cut.finished is not None
    assert (cut.finished.reason, len(cut.steps)) == ("interrupted", 4)
    assert conversation.messages[-1] == Message(role="assistant", content=cut.text)
    for text in TURNS[1:]:
        before = conversation.messages
        check(loaded, turn(conversation, text), before, text)


def test_an_answer_interrupted_before_its_first_token_takes_the_message_back(tiny: Any) -> None:
    loaded = tiny("llama")
    conversation = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=6))
    turn(conversation, TURNS[0])
    before = conversation.messages
    events = conversation.ask("never mind")
    assert isinstance(next(events), Started)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # in the middle of a forward, so that the first layer has the new tokens and the second has not
    hook = loaded.model.model.layers[1].register_forward_pre_hook(interrupt)
    finished = next(events)
    hook.remove()
    assert isinstance(finished, Finished)
    assert finished.reason == "interrupted"
    assert next(events, None) is None
    assert conversation.messages == before
    # the half that was written is taken back, and the rest is gone on with
    started = check(loaded, turn(conversation, TURNS[1]), before, TURNS[1])
    assert started.reused_tokens > 0


def test_a_reader_that_leaves_keeps_what_was_said(tiny: Any) -> None:
    conversation = Conversation(tiny("llama"), sampling=GREEDY)
    events = conversation.ask("x")
    said = [event.text for event in (next(events) for _ in range(6)) if isinstance(event, Step)]
    events.close()
    assert conversation.messages == (
        Message(role="user", content="x"),
        Message(role="assistant", content="".join(said)),
    )


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_template_that_rewrites_earlier_turns_changes_no_answer(tiny: Any, model_type: str) -> None:
    starts = talk(tiny(model_type, REWRITING_TEMPLATE))
    notes = [note for start in starts for note in start.notes]
    if model_type in CANNOT_CROP:
        assert [start.reused_tokens for start in starts] == [0, 0, 0, 0]
        assert sum("this cache cannot be cropped, so all" in note for note in notes) == 3
    else:
        assert all(start.reused_tokens for start in starts[1:])
        assert not notes


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "llama"])
@torch.inference_mode()
def test_a_window_can_be_cropped_until_it_moves_on(tiny: Any, model_type: str) -> None:
    model = tiny(model_type).model
    for length, croppable in ((WINDOW - 1, True), (WINDOW, model_type == "llama")):
        forward = make_forward(model)
        forward(range(5, 5 + length))
        assert forward.crop(6) == croppable
        if croppable:
            fresh = make_forward(model)(range(5, 5 + 9))
            assert torch.allclose(forward(range(11, 14)), fresh, atol=1e-5)


def test_a_new_conversation_reuses_what_it_shares_with_the_last(tiny: Any) -> None:
    loaded = tiny("llama")
    conversation = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=8))
    for text in TURNS[:2]:
        turn(conversation, text)
    system = (Message(role="system", content="Be brief."),)
    for messages, shared in ((), True), (system, False), (system, True), ((), False):
        conversation.restart(messages)
        started = check(loaded, turn(conversation, TURNS[0]), messages, TURNS[0])
        # to the cached tokens it is the same prompt again, all but the last of them stay
        assert (started.reused_tokens == len(started.prompt_ids) - 1) == shared


def test_the_conversation_of_a_file_goes_on_like_any_other(tiny: Any, tmp_path: Path) -> None:
    loaded = tiny("mistral")
    first = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=8))
    turn(first, TURNS[0])
    write_transcript(tmp_path / "chat.json", Transcript(model=loaded.name, messages=first.messages))
    again = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=8))
    again.restart(read_transcript(tmp_path / "chat.json").messages)
    assert turn(again, TURNS[1]).token_ids == turn(first, TURNS[1]).token_ids


@pytest.mark.parametrize("sampling", [{"temperature": 0, "repetition_penalty": 1.8}, {"temperature": 1.0, "top_k": 20}])
def test_penalties_and_draws_see_the_whole_conversation(tiny: Any, sampling: dict[str, Any]) -> None:
    loaded = tiny("llama")
    flags = {**sampling, "seed": 5}
    conversation = Conversation(loaded, sampling=flags, stop=StopCriteria(max_new_tokens=12))
    for text in TURNS[:3]:
        trace = turn(conversation, text)
        assert trace.started is not None
        torch.manual_seed(5)
        expected = reference_ids(
            loaded.model, list(trace.started.prompt_ids), len(trace.steps), do_sample=not trace.started.sampling.greedy,
            **{name: value for name, value in sampling.items() if value},
        )  # fmt: skip
        assert trace.token_ids == expected


def test_an_answer_at_a_stop_text_goes_on_from_the_trimmed_text(tiny: Any) -> None:
    loaded = tiny("llama")
    whole = turn(Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=12)), "x").text
    stop = StopCriteria(max_new_tokens=12, stop=(whole[4:6],))
    conversation = Conversation(loaded, sampling=GREEDY, stop=stop)
    for text in ("x", *TURNS[:2]):
        before = conversation.messages
        check(loaded, turn(conversation, text), before, text)


def test_without_a_cache_everything_is_read_anew(tiny: Any) -> None:
    conversation = Conversation(tiny("llama"), sampling=GREEDY, stop=StopCriteria(max_new_tokens=4), cache="none")
    traces = [turn(conversation, text) for text in TURNS[:2]]
    assert [trace.started.reused_tokens for trace in traces if trace.started] == [0, 0]
    assert {step.kv_bytes for trace in traces for step in trace.steps} == {None}


# Limits and refusals


def test_a_conversation_beyond_the_context_is_refused_and_goes_on(tiny: Any) -> None:
    loaded = tiny("llama")
    conversation = Conversation(loaded, sampling=GREEDY, stop=StopCriteria(max_new_tokens=8))
    turn(conversation, TURNS[0])
    before = conversation.messages
    with pytest.raises(UsageError, match=r"has \d+ tokens, and the model's context is 512") as refusal:
        conversation.ask("x" * 600)
    assert refusal.value.hint == "shorten the message, or begin a new conversation"
    assert conversation.messages == before
    started = check(loaded, turn(conversation, TURNS[1]), before, TURNS[1])
    assert started.reused_tokens > 0


def test_an_answer_ends_where_the_context_does(tiny: Any) -> None:
    conversation = Conversation(tiny("llama"), sampling=GREEDY, stop=StopCriteria(max_new_tokens=40))
    trace = turn(conversation, "x" * 470)
    assert trace.finished is not None
    assert trace.finished.reason == "context"
    assert trace.finished.cached_tokens == 512
    with pytest.raises(UsageError, match="context is 512"):
        conversation.ask("y")


def test_a_model_without_a_template_cannot_chat(tiny: Any) -> None:
    loaded = tiny("llama", "")
    with pytest.raises(UsageError, match="has no chat template") as refusal:
        Conversation(loaded)
    assert refusal.value.hint == 'try: llminfer generate --raw "Once upon a time"'


def test_a_template_that_refuses_is_quoted(tiny: Any) -> None:
    loaded = tiny(
        "llama", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    )
    conversation = Conversation(loaded, messages=[Message(role="system", content="Be brief.")])
    with pytest.raises(UsageError, match="refused the conversation: no system here"):
        conversation.ask("x")


# What can be gone on with


def test_what_a_handful_of_tokens_shows(tiny: Any) -> None:
    ways = {name: choose_feed_mode(tiny(name, letters=False).model, range(70, 90)) for name in CONFIGS}
    # some lose their state when several tokens come at once: their forward feeds one at a time by itself
    assert set(ways.values()) == {FeedMode.TOGETHER}


def test_a_model_that_loses_its_state_is_fed_one_token_at_a_time(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llminfer.engine.forward.chunks.why_one_at_a_time", lambda config: None)
    for name in ("recurrent_gemma", "mamba"):
        model = tiny(name, letters=False).model
        assert choose_feed_mode(model, range(70, 90)) is FeedMode.ONE_BY_ONE


def test_a_model_whose_forward_fails_is_not_trusted() -> None:
    assert choose_feed_mode(object(), [1, 2]) is FeedMode.NEVER


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 512),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
            64,
        ),
    ],
)
def test_rotary_frequencies_that_follow_the_length_end_the_reuse(
    tmp_path: Path, rope: dict[str, Any], length: int | None
) -> None:
    config = AutoConfig.for_model("llama", **_SIZES, rope_parameters=rope)
    assert exact_length(config) == length
    save_tiny_checkpoint(tmp_path, config)
    starts = talk(load(inspect_checkpoint(tmp_path), dtype="float32", device="cpu"))
    for start in starts[1:]:
        assert bool(start.reused_tokens) == (length is None or len(start.prompt_ids) <= length)


# The real model


def test_the_real_model_answers_every_turn_as_from_the_beginning(smollm: LoadedModel) -> None:
    questions = ("Name three rivers of France.", "Which of them is the longest?", "Thank you. Say goodbye.")
    conversation = Conversation(
        smollm,
        sampling=GREEDY,
        stop=StopCriteria(max_new_tokens=16),
        messages=[Message(role="system", content="You are brief.")],
    )
    starts = []
    for cut_after, text in zip((None, 6, None), questions, strict=True):
        before = conversation.messages
        starts.append(check(smollm, turn(conversation, text, cut_after=cut_after), before, text))
    assert starts[1].reused_tokens >= len(starts[0].prompt_ids)
    assert starts[2].reused_tokens >= len(starts[1].prompt_ids)
    conversation.restart()
    check(smollm, turn(conversation, questions[0]), (), questions[0])
