"""The compiled decode step: the tokens of `generate()`, no graph made in the middle of a run, refusals, fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from llminfer.api import generate
from llminfer.engine import generate as run_module
from llminfer.engine import prepare
from llminfer.engine.checkpoints.checkpoint import inspect_checkpoint
from llminfer.engine.forward import torch_compile
from llminfer.engine.forward.forward import PlainForward, make_forward
from llminfer.engine.forward.torch_compile import CompiledStep, check_compiled, compile_step, compiled_room
from llminfer.engine.load import load
from llminfer.engine.machine.clock import Clock
from llminfer.engine.model import LoadedModel
from llminfer.errors import UnsupportedArchitecture, UsageError
from llminfer.events import Trace
from llminfer.params import CacheOptions, Execution, StopCriteria
from llminfer.render.document import run_document
from llminfer.render.summary import summary
from tests.engine.forward.test_forward import steps_of
from tests.engine.kv_cache.test_kinds import fresh, prompt_of
from tests.engine.test_parity import reference_ids
from tests.tiny_models import WINDOW, tiny_config

COMPILED = Execution(compiled=True)
FAMILIES = ("bloom", "gpt2", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
NEW = 2 * WINDOW  # from a short prompt, past the window


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs run as they are, without inductor, which takes half a minute; the list grows with every run of one."""
    runs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            runs.append(graph)
            return graph(*arguments)

        return call

    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", backend)
    monkeypatch.setattr(torch_compile, "_missing_compiler", lambda device: None)
    return runs


def load_compiled(folder: Path) -> LoadedModel:
    return load(inspect_checkpoint(folder), dtype="float32", device="cpu", execution=COMPILED)


def run_of(loaded: LoadedModel, text: str = "Hello there", tokens: int = 6, **options: Any) -> Trace:
    trace = Trace()
    stop = StopCriteria(max_new_tokens=tokens, ignore_eos=True)
    for event in generate(loaded, text, sampling={"temperature": 0}, raw=True, stop=stop, **options):
        trace.add(event)
    return trace


def tokens_of(model: Any, step: CompiledStep, room: int, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():  # as a run does
        way = partial(PlainForward, step=step.call)
        forward = make_forward(model, options=CacheOptions(kind="static"), max_tokens=room, factory=way)
    return [step.token_id for step in steps_of(forward, prompt, count)]


# torch warns of what its own compiler does with BLOOM's activation
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("model_type", "length"),
    [
        ("llama", 1),
        ("gemma3_text", 5),
        *(pytest.param(model_type, 5, marks=pytest.mark.slow) for model_type in FAMILIES),
        pytest.param("gemma3_text", 1, marks=pytest.mark.slow),
    ],
)
def test_every_token_after_the_prompt_runs_in_a_graph_made_before(
    graphs: list[Any], model_type: str, length: int
) -> None:
    model, prompt, room = fresh(model_type), prompt_of(length), compiled_room(5 + NEW)
    step = compile_step(model, room)
    assert step.notes == ()
    made, runs = len({id(graph) for graph in graphs}), len(graphs)
    assert tokens_of(model, step, room, prompt, NEW) == reference_ids(model, prompt, NEW)
    assert len({id(graph) for graph in graphs}) == made
    # a sliding layer after a prompt of one token is at a length that the compiler takes for a constant
    assert NEW - 2 <= len(graphs) - runs <= NEW - 1


def test_another_run_of_the_same_room_reuses_the_graph(graphs: list[Any]) -> None:
    model = fresh("llama")
    compile_step(model, 256)
    made = counters["stats"]["unique_graphs"]
    compile_step(model, 256)
    assert counters["stats"]["unique_graphs"] == made


def test_a_model_is_warmed_up_once_for_each_room(
    graphs: list[Any], monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    loaded, warmed, warm = load_compiled(tiny_llama), [], torch_compile._warm

    def counted(model: Any, room: int) -> Any:
        warmed.append(room)
        return warm(model, room)

    def run(tokens: int) -> tuple[int, float, list[int]]:
        """Runs of a graph, what making it took, and the tokens."""
        graphs.clear()
        trace = run_of(loaded, tokens=tokens)
        assert trace.started is not None
        assert trace.started.compile_s is not None
        return len(graphs), trace.started.compile_s, trace.token_ids

    monkeypatch.setattr(torch_compile, "_warm", counted)
    (first_runs, compile_s, first), (again_runs, again_s, again) = run(6), run(6)
    assert (first_runs, again_runs) == (1 + 5, 5)
    assert compile_s > again_s == 0
    assert first == again
    assert warmed == [256]
    run(300)
    assert warmed == [256, 512]


def test_a_compiled_run_has_the_tokens_and_the_bytes_of_its_static_cache(graphs: list[Any], tiny_llama: Path) -> None:
    loaded = load_compiled(tiny_llama)
    trace = run_of(loaded)
    plain = run_of(load(inspect_checkpoint(tiny_llama), dtype="float32", device="cpu"))
    assert trace.token_ids == plain.token_ids
    assert len(graphs) == 1 + 5
    assert trace.started is not None
    assert trace.started.cache == "static"
    assert trace.started.compile_s is not None
    assert trace.finished is not None
    assert trace.finished.kv is not None
    assert trace.finished.kv.tokens == 256
    assert {step.kv_bytes for step in trace.steps} == {trace.finished.kv.total_bytes}
    assert not any(graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear) for graph in graphs)


def test_a_saved_cache_goes_on_in_a_compiled_run(graphs: list[Any], tiny_llama: Path, tmp_path: Path) -> None:
    loaded = load_compiled(tiny_llama)
    options = CacheOptions(kind="static", file=tmp_path / "saved")
    first = run_of(loaded, cache=options)
    again = run_of(loaded, cache=options)
    assert again.started is not None
    assert again.started.reused_tokens > 0
    assert again.token_ids == first.token_ids


def test_compiling_is_left_out_of_the_clock(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    now = [0.0]

    def slow(model: Any, room: int) -> CompiledStep:
        now[0] += 100
        return CompiledStep(call=None, compile_s=100.0)

    monkeypatch.setattr(run_module, "compile_step", slow)
    monkeypatch.setattr(prepare, "Clock", partial(Clock, now=lambda: now[0]))
    trace = run_of(load_compiled(tiny_llama))
    assert trace.started is not None
    assert trace.started.compile_s == 100
    assert trace.ttft_s == 0
    assert run_document(trace)["timing"]["compile_s"] == 100
    assert any("compile 100" in line.plain for line in summary(trace))
    assert trace.started.tokenize_s == 0


def test_without_a_compiler_the_model_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    trace = run_of(load_compiled(tiny_llama))
    assert trace.started is not None
    assert [note for note in trace.started.notes if "no-such-compiler was not found" in note]
    plain = run_of(load(inspect_checkpoint(tiny_llama), dtype="float32", device="cpu"))
    assert trace.token_ids == plain.token_ids


def test_a_compiler_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no headers\nand a long log")

    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    monkeypatch.setattr(torch_compile, "_missing_compiler", lambda device: None)
    trace = run_of(load_compiled(tiny_llama))
    assert trace.started is not None
    notes = [note for note in trace.started.notes if "torch.compile failed" in note]
    assert len(notes) == 1
    assert "no headers" in notes[0]
    assert "\n" not in notes[0]
    assert len(trace.steps) == 6


@given(st.integers(min_value=1, max_value=1 << 20))
def test_rooms_are_few_and_at_most_twice_what_is_needed(tokens: int) -> None:
    room = compiled_room(tokens)
    assert room >= tokens
    assert room.bit_count() == 1
    assert room == 256 or room < 2 * tokens


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "one graph"),
        ("deepseek_v4", "there is no rule for"),
        ("gpt_neo", "one graph"),
        ("jetmoe", "one graph"),
    ],
)
def test_what_cannot_be_compiled_is_told_from_the_config(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=reason) as refused:
        check_compiled(tiny_config(model_type), "the model")
    assert refused.value.hint == "drop --compile"


def test_another_cache_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="--compile and --cache dynamic"):
        run_of(load_compiled(tiny_llama), cache="dynamic")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "--cache", "dynamic"),
        ("generate", "x", "--engine", "native"),
        ("generate", "x", "--num-samples", "2"),
        ("generate", "--prompts", "x.jsonl"),
        ("chat",),
    ],
)
def test_options_that_do_not_go_with_compile_are_told_before_anything_loads(
    run_cli: Callable[..., tuple[int, bytes, str]], arguments: tuple[str, ...]
) -> None:
    code, out, err = run_cli(*arguments, "--compile", "--model", "./no-such-model")
    assert code == 2
    assert out == b""
    assert "no-such-model" not in err, "the model was looked for first"
    assert "--compile" in err
    assert len(err.splitlines()) <= 2


# inductor wants a compiler with OpenMP, which the one from the package index has not
without_cxx = torch_compile._missing_compiler(torch.device("cpu"))
needs_cxx = pytest.mark.skipif(without_cxx is not None, reason=str(without_cxx))


@pytest.mark.slow
@needs_cxx
def test_inductor_gives_the_tokens_of_generate_in_every_state_of_a_window(default_checkpoint: Path) -> None:
    torch._dynamo.reset()
    model, prompt = fresh("gemma3_text"), prompt_of(5)
    step = compile_step(model, 256)
    assert step.notes == ()
    assert tokens_of(model, step, 256, prompt, NEW) == reference_ids(model, prompt, NEW)


@pytest.mark.slow
@needs_cxx
def test_the_real_model_compiles_once_and_is_then_read_from_the_disk(default_checkpoint: Path) -> None:
    loaded = load_compiled(default_checkpoint)
    torch._dynamo.reset()
    trace = run_of(loaded, "The capital of France is", tokens=24)
    assert trace.started is not None
    assert not [note for note in trace.started.notes if "compile" in note]
    prompt = list(trace.started.prompt_ids)
    assert trace.token_ids == reference_ids(loaded.model, prompt, 24)
    torch._dynamo.reset()
    counters.clear()
    assert compile_step(loaded.model, 256).notes == ()
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
