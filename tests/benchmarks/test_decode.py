"""The decode benchmark: a whole session of tiny contenders, and what it does when one of them fails."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.decode import Model as DecodeModel
from benchmarks.decode import elements_cached, load, parse_arguments, prompt_of, worker_environment
from benchmarks.decoding import peer_models, worker
from benchmarks.decoding.contenders import CONTENDERS, REFERENCE, choose
from benchmarks.decoding.report import Setting, document_of, format_document
from benchmarks.decoding.session import Run, Session, Worker, WorkerFailed, ask, run_rounds, start, stop
from llminfer.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent.parent


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_a_session_of_two_contenders_and_one_that_is_not_there(tiny_llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "decode.py"), "--model", str(tiny_llama), "--json"]
    command += ["--contenders", "llminfer,onnxruntime-int4", "--peers", str(tmp_path / "no-peers")]
    command += ["--rounds", "2", "--prompt-tokens", "9", "--new-tokens", "5", "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout, parse_constant=refuse_constant)
    assert document["schema_version"] == 1
    assert [row["name"] for row in document["contenders"]] == [REFERENCE, "llminfer"]
    assert document["skipped"] == [{"name": "onnxruntime-int4", "reason": "there is no no-peers: make bench-peers"}]
    reference, ours = document["contenders"]
    assert reference["decode_ratio"]["rounds"] == reference["prefill_ratio"]["rounds"] == [1.0, 1.0]
    assert reference["equal_tokens"] == ours["equal_tokens"] == 5
    # all but the embedding table, which is no head here
    with safe_open(str(tiny_llama / "model.safetensors"), framework="np") as tensors:
        held = {name: tensors.get_tensor(name).nbytes for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    read_in_full = sum(held.values()) - held["model.embed_tokens.weight"]
    # and two tables of rotary frequencies, of 4 elements each
    assert reference["weight_bytes"] == ours["weight_bytes"] == read_in_full + 2 * 4 * 4
    # two layers, keys and values, two heads of 8, in float32; 9 + 5 // 2 tokens
    assert ours["mean_kv_bytes"] == 2 * 2 * 2 * 8 * 4 * 11
    read = ours["weight_bytes"] + ours["mean_kv_bytes"]
    rates = zip(ours["decode_tokens_per_s"]["rounds"], document["bandwidth_bytes_per_s"]["rounds"], strict=True)
    assert ours["roofline_share"]["rounds"] == pytest.approx([rate * read / speed for rate, speed in rates])
    assert all(row["peak_bytes"] > 50 * 1024**2 for row in document["contenders"])
    assert "all 5" in format_document(document)


# a worker that answers from a script: what it says to its n-th request
FAKE = """
import json, os, sys, time
name, log = sys.argv[1:3]
replies = {replies}
for number, line in enumerate(sys.stdin):
    with open(log, "a") as file:
        file.write(name + " ")
    reply = replies[min(number, len(replies) - 1)]
    if reply == "die":
        print("first words", file=sys.stderr)
        print("no more memory", file=sys.stderr, flush=True)
        os._exit(3)
    if reply == "abort":
        os.abort()
    if reply == "hang":
        time.sleep(60)
    print(reply if isinstance(reply, str) else json.dumps(reply), flush=True)
"""
GOOD = {"tokens": [1, 2, 3], "prefill_s": 0.5, "decode_s": 0.25, "peak_bytes": 7}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Any]:
    """Starts workers that answer from a list; `fake.log` says who was asked, in order."""
    workers: list[Worker] = []

    def make(name: str, replies: list[Any]) -> Worker:
        command = [sys.executable, "-c", FAKE.format(replies=repr(replies)), name, str(make.log)]
        workers.append(start(name, command, worker_environment(1)))
        return workers[-1]

    make.log = tmp_path / "log"
    yield make
    for one in workers:
        stop(one)


def rounds_of(workers: list[Worker], rounds: int = 2, timeout_s: float = 30.0) -> tuple[Session, list[str]]:
    said: list[str] = []
    session = run_rounds(
        workers,
        rounds=rounds,
        prompt_ids=[5],
        new_tokens=3,
        timeout_s=timeout_s,
        probe=lambda: 1e9,
        say=said.append,
        pause_s=0.0,
    )
    return session, said


def test_the_order_rotates_and_the_first_round_is_not_counted(fake: Any) -> None:
    session, _ = rounds_of([fake(name, [GOOD]) for name in "abc"], rounds=3)
    assert fake.log.read_text() == "a b c b c a c a b a b c "
    expected = Run(tokens=(1, 2, 3), prefill_s=0.5, decode_s=0.25)
    assert session.runs == {name: [expected] * 3 for name in "abc"}
    assert session.bandwidths_bytes_per_s == [1e9] * 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("die", "ended with exit code 3: no more memory"),
        ("abort", "ended by SIGABRT"),
        ("hang", "took longer than 5 s"),
        ("no json", "does not keep to the protocol: b'no json'"),
        ({"tokens": [1]}, "does not keep to the protocol: 'prefill_s'"),
        ({"error": "the model is too small"}, "the model is too small"),
    ],
)
def test_who_fails_is_dropped_in_one_line_and_the_others_go_on(fake: Any, reply: Any, reason: str) -> None:
    workers = [fake("bad", [GOOD, GOOD, reply]), fake("good", [GOOD])]
    session, said = rounds_of(workers, timeout_s=5.0 if reply == "hang" else 60.0)
    assert session.skipped == {"bad": reason}
    assert f"skipped bad: {reason}" in said
    assert list(session.runs) == ["good"]
    assert len(session.runs["good"]) == 2
    assert workers[0].process.poll() is not None


def test_a_worker_that_cannot_start_or_be_asked_says_so(fake: Any) -> None:
    with pytest.raises(WorkerFailed, match="No such file"):
        start("x", ["/no/such/python"], {})
    dead = fake("dead", ["die"])
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="exit code 3: no more memory"):
            ask(dead, {"do": "run"}, timeout_s=30.0)


def test_the_worker_keeps_its_output_for_replies_and_names_what_is_missing() -> None:
    """The real worker, with a contender whose library prints, and one whose library is not here."""
    code = textwrap.dedent(
        """
        import os
        from benchmarks.decoding import worker
        def noisy(contender):
            os.write(1, b"a library's banner")
            return (lambda ids, count: worker.result([7] * count, 1.0, 2.0, count)), {"weight_bytes": 1}
        def absent(contender):
            import no_such_library
        worker.MAKERS = {"noisy": noisy, "absent": absent}
        worker.main()
        """
    )
    one = start("noisy", [sys.executable, "-c", code], worker_environment(1))
    try:
        with pytest.raises(WorkerFailed, match=r"no_such_library is not installed for .*: make bench-peers"):
            ask(one, {"do": "load", "contender": {"kind": "absent"}}, timeout_s=60)
        assert ask(one, {"do": "load", "contender": {"kind": "noisy"}}, timeout_s=60)["weight_bytes"] == 1
        reply = ask(one, {"do": "run", "prompt_ids": [1], "new_tokens": 2}, timeout_s=60)
        assert (reply["tokens"], reply["prefill_s"], reply["decode_s"]) == ([7, 7], 1.0, 2.0)
    finally:
        stop(one)


def test_what_cannot_be_made_for_a_peer_is_one_line(tiny_llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """With a Python that has no peer in it, and without a GGUF file."""
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path / "cache"))
    python = tmp_path / "peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    model = DecodeModel(name="tiny", argument=str(tiny_llama), folder=tiny_llama, gguf=None)
    arguments = parse_arguments(["--peers", str(tmp_path / "peers")])
    rows = {contender.name: contender for contender in CONTENDERS}
    with pytest.raises(WorkerFailed, match="it needs a GGUF file"):
        load(rows["llama.cpp-q4_0"], model, "x", arguments)
    with pytest.raises(WorkerFailed, match=r"making ctranslate2-int8 failed: ModuleNotFoundError: .*ctranslate2"):
        load(rows["ctranslate2-int8"], model, "x", arguments)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_the_weights_that_a_step_reads_are_counted_once() -> None:
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    # q and o 8 × 8, k and v 4 × 8, three matrices of the MLP 16 × 8, three norms of 8, two frequency tables of 2
    layers = 4 * (2 * 64 + 2 * 32 + 3 * 128 + 3 * 8 + 2 * 2)
    assert worker.tensor_bytes(model) == layers + 4 * 11 * 8

    class Packed(nn.Module):
        held_bytes = 5

    model.lm_head = Packed()
    assert worker.tensor_bytes(model) == layers + 5


def test_every_row_of_the_table_has_what_runs_it() -> None:
    assert len({contender.name for contender in CONTENDERS}) == len(CONTENDERS)
    for contender in CONTENDERS:
        assert contender.kind in worker.MAKERS
        assert contender.is_peer == (contender.kind not in ("generate", "llminfer"))
        assert contender.made is None or contender.made[0] in peer_models.MAKERS


def test_contenders_are_chosen_by_name_or_spelled_out() -> None:
    assert [one.name for one in choose("llminfer, llminfer")] == [REFERENCE, "llminfer"]
    assert choose(None) == CONTENDERS
    (_, ours) = choose("llminfer+weights=int8+cache=static+compiled=true")
    assert ours.options == {"weights": "int8", "cache": "static", "compiled": True}
    with pytest.raises(UsageError, match="no contender is called vllm"):
        choose("vllm")
    with pytest.raises(UsageError, match="colour=red is no setting"):
        choose("llminfer+colour=red")


@pytest.mark.parametrize("tokens", [2, 9, 128, 300])
def test_the_prompt_has_exactly_so_many_tokens(tiny_llama: Path, tokens: int) -> None:
    text, ids = prompt_of(tiny_llama, tokens)
    assert len(ids) == tokens
    assert Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode(text).ids == ids


def test_the_prompt_of_the_built_in_model(default_checkpoint: Path) -> None:
    for tokens in (1, 128, 1024):
        assert len(prompt_of(default_checkpoint, tokens)[1]) == tokens
    # 30 layers, keys and values, 3 heads of 64
    assert elements_cached(default_checkpoint, 192) == 30 * 2 * 3 * 64 * 192


def test_the_document_and_its_table() -> None:
    contenders = choose("llminfer,llama.cpp-q4_0,openvino-q4_0")
    session = Session(
        bandwidths_bytes_per_s=[20e9, 25e9, 30e9],
        busy_cores=[0.0, 1.5, 1.5],
        runs={
            REFERENCE: [Run(tokens=(1, 2, 3), prefill_s=0.5, decode_s=seconds) for seconds in (1.0, 2.0, 4.0)],
            "llminfer": [Run(tokens=(1, 2, 3), prefill_s=0.25, decode_s=seconds) for seconds in (0.5, 1.0, 1.0)],
            "llama.cpp-q4_0": [Run(tokens=(1, 9, 3), prefill_s=1.0, decode_s=0.1) for _ in range(3)],
        },
        skipped={"openvino-q4_0": "it is not here"},
    )
    setting = Setting(
        model="a model",
        prompt_tokens=10,
        new_tokens=3,
        rounds=3,
        threads=2,
        kv_elements=1000,
        machine={"cores": 2},
        date="2026-01-02",
    )
    facts = {
        REFERENCE: {"weight_bytes": 10**9, "peak_bytes": 2**30},
        "llminfer": {"weight_bytes": 10**9, "peak_bytes": 2**29},
    }
    document = document_of(setting, contenders, session, facts, {"llminfer": 0.5, REFERENCE: 0.01})
    ours = document["contenders"][1]
    # round by round: 1/0.5, 2/1, 4/1
    assert ours["decode_ratio"]["rounds"] == [2.0, 2.0, 4.0]
    shares = [2 / 0.5 * 1000004000 / 20e9, 2 / 1 * 1000004000 / 25e9, 2 / 1 * 1000004000 / 30e9]
    assert ours["roofline_share"]["median"] == pytest.approx(statistics.median(shares))
    expected = """\
        a model · 10 + 3 tokens, greedy · 2 threads · 3 rounds · memory read at 25.0 GB/s (20.0–30.0)
        contender          decode tokens/s      ×  prefill tokens/s     ×  roofline  weights      peak  same tokens
        generate-float32     1.0 (0.5–2.0)   1.00  20.0 (20.0–20.0)  1.00      0.04  954 MiB  1024 MiB        all 3
        llminfer             2.0 (2.0–4.0)   2.00  40.0 (40.0–40.0)  2.00      0.08  954 MiB   512 MiB        all 3
        llama.cpp-q4_0    20.0 (20.0–20.0)  20.00  10.0 (10.0–10.0)  0.50         –        –         –      first 1
        skipped openvino-q4_0: it is not here
        note: llminfer used 0.50 cores while it waited, which slows the others
        note: other programs kept 1.5 cores busy; these figures are not to be trusted"""
    assert format_document(document) == textwrap.dedent(expected)
    json.dumps(document, allow_nan=False)
