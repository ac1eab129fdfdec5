"""One contender of the decode benchmark in a process of its own: loads once, runs on request, sleeps in between.

It runs under whichever Python has the contender's library, so it imports that library late, and of
this project only what the contender itself needs. One JSON document a line goes each way:

    in   {"do": "load", "contender": {...}}
    in   {"do": "run", "prompt_ids": [...], "new_tokens": n}
    out  {...} or {"error": "one line"}

A run's times mean the same for everyone: `prefill_s` from the call until the first new token is known,
`decode_s` from there until the last one is. An EOS token ends nothing.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

Run = Callable[[list[int], int], dict[str, Any]]


def main() -> None:
    """Answer one request after another until standard input ends."""
    replies, run = _claim_stdout(), None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                start_s = time.perf_counter()
                run, facts = MAKERS[request["contender"]["kind"]](request["contender"])
                reply = {**facts, "load_s": time.perf_counter() - start_s}
            else:
                assert run is not None
                reply = run(request["prompt_ids"], request["new_tokens"])
            reply["peak_bytes"] = peak_bytes()
        except Exception as error:
            reply = {"error": one_line(error)}
        print(json.dumps(reply), file=replies, flush=True)


def one_line(error: Exception) -> str:
    """What went wrong, in words that fit a table."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed for {sys.executable}: make bench-peers"
    first = (str(error).strip() or "no message").splitlines()[0]
    return first if hasattr(error, "exit_code") else f"{type(error).__name__}: {first}"


def peak_bytes() -> int:
    """The most memory that this process has had resident, libraries and mapped files included."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        # the kernel resets it at exec; ru_maxrss may still be the parent's
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def timed(tokens: Iterable[int], start_s: float, new_tokens: int) -> dict[str, Any]:
    """A run from a stream of tokens: each is stamped when it comes."""
    ids, at_s = [], []
    for token in tokens:
        ids.append(int(token))
        at_s.append(time.perf_counter())
        if len(ids) == new_tokens:
            break
    return result(ids, at_s[0] - start_s, at_s[-1] - at_s[0], new_tokens)


def result(ids: list[int], prefill_s: float, decode_s: float, new_tokens: int) -> dict[str, Any]:
    """A run as the driver wants it."""
    if len(ids) != new_tokens:
        raise RuntimeError(f"gave {len(ids)} tokens where {new_tokens} were asked for")
    return {"tokens": ids, "prefill_s": prefill_s, "decode_s": decode_s}


def _claim_stdout() -> TextIO:
    """Standard output for replies alone: whatever a library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


# transformers and ours


def make_generate(contender: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """`model.generate()`, greedy; a stopping criterion, which it calls after every token, reads the clock."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

    class Clock(StoppingCriteria):  # type: ignore[misc]
        def __init__(self) -> None:
            self.at_s: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.at_s.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    model = AutoModelForCausalLM.from_pretrained(contender["folder"], dtype=getattr(torch, contender["dtype"])).eval()

    def run(prompt_ids: list[int], new_tokens: int) -> dict[str, Any]:
        model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
        prompt, clock, start_s = torch.tensor([prompt_ids]), Clock(), time.perf_counter()
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), stopping_criteria=[clock])
        ids = output[0, len(prompt_ids) :].tolist()
        return result(ids, clock.at_s[0] - start_s, clock.at_s[-1] - clock.at_s[0], new_tokens)

    return run, {"weight_bytes": tensor_bytes(model)}


def make_llminfer(contender: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """Our loop with all that a user gets: sampler, text and events. The first step's forward is the prefill."""
    from llminfer.api import generate, load
    from llminfer.events import Trace
    from llminfer.params import CacheOptions, SamplingParams, StopCriteria

    # what the row does not state is as users get it
    cache = {"cache": CacheOptions(kind=contender["cache"])} if "cache" in contender else {}
    execution = {name: contender[name] for name in ("weights", "engine", "compiled") if name in contender}
    loaded = load(contender["model"], device="cpu", dtype=contender.get("dtype", "auto"), **execution)

    def run(prompt_ids: list[int], new_tokens: int) -> dict[str, Any]:
        trace, stop = Trace(), StopCriteria(max_new_tokens=new_tokens, ignore_eos=True)
        greedy = SamplingParams(temperature=0.0)
        for event in generate(loaded, contender["prompt"], sampling=greedy, stop=stop, raw=True, **cache):
            trace.add(event)
        if trace.finished is not None and trace.finished.error is not None:
            raise trace.finished.error
        if trace.started is None or list(trace.started.prompt_ids) != prompt_ids:
            raise RuntimeError("our tokenizer gives other ids for the prompt")
        # the others get ids, so tokenizing is not in their time
        prefill_s = trace.steps[0].at_s - trace.started.tokenize_s
        return result(trace.token_ids, prefill_s, trace.decode_s or 0.0, new_tokens)

    return run, {"weight_bytes": tensor_bytes(loaded.model)}


def tensor_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads in full, each counted once.

    The embedding's own are left out, of which a step reads a row; a head that shares them counts them.
    Layers in other formats say themselves what they hold, for not all of them hold tensors.
    """
    held: dict[object, int] = {}
    for module in model.modules():
        if module is model.get_input_embeddings():
            continue
        packed = getattr(module, "held_bytes", None)
        if packed is not None:
            held[module] = packed
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(held.values())


# peers


def make_llama_cpp(contender: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """llama.cpp through its C interface: one batch for the prompt, then a token at a time, greedy from its logits."""
    import ctypes

    import llama_cpp
    import numpy as np

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(contender["path"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp cannot load the file")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_threads = params.n_threads_batch = contender["threads"]
    params.n_ctx = contender["context"]
    params.n_batch = contender["context"]
    params.type_k = params.type_v = {"float32": 0, "float16": 1}[contender["kv_dtype"]]
    context = llama_cpp.llama_init_from_model(model, params)

    def stream(prompt_ids: list[int]) -> Iterator[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        ids = prompt_ids
        while True:
            array = (ctypes.c_int32 * len(ids))(*ids)  # the batch points into it
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))):
                raise RuntimeError("llama.cpp cannot decode")
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocabulary,))
            ids = [int(logits.argmax())]
            yield ids[0]

    def run(prompt_ids: list[int], new_tokens: int) -> dict[str, Any]:
        return timed(stream(prompt_ids), time.perf_counter(), new_tokens)

    # the callback must outlive the library's use of it
    run.keep = quiet  # type: ignore[attr-defined]
    return run, {"weight_bytes": contender["weight_bytes"], "version": llama_cpp.__version__}


def make_onnxruntime(contender: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """onnxruntime-genai on the model that its own builder made."""
    import onnxruntime_genai as genai

    config = genai.Config(contender["path"])
    config.clear_providers()
    threads = {"session_options": {"intra_op_num_threads": contender["threads"]}}
    config.overlay(json.dumps({"model": {"decoder": threads}}))
    model = genai.Model(config)

    def stream(prompt_ids: list[int], new_tokens: int) -> Iterator[int]:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(prompt_ids) + new_tokens)
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt_ids)
        while not generator.is_done():
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    def run(prompt_ids: list[int], new_tokens: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        return timed(stream(prompt_ids, new_tokens), start_s, new_tokens)

    return run, {"weight_bytes": peer_facts(contender)["weight_bytes"], "version": genai.__version__}


def make_ctranslate2(contender: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """ctranslate2 on the model that its own converter made."""
    import ctranslate2

    generator = ctranslate2.Generator(
        contender["path"], device="cpu", compute_type=contender["format"], intra_threads=contender["threads"]
    )
    tokens = _token_texts(Path(contender["folder"]))

    def run(prompt_ids: list[int], new_tokens: int) -> dict[str, Any]:
        prompt, start_s = [tokens[token_id] for token_id in prompt_ids], time.perf_counter()
        # an id that is no token: nothing ends the run before its length
        steps = generator.generate_tokens(prompt, max_length=new_tokens, sampling_topk=1, end_token=[len(tokens)])
        return timed((step.token_id for step in steps), start_s, new_tokens)

    return run, {"weight_bytes": peer_facts(contender)["weight_bytes"], "version": ctranslate2.__version__}


def make_openvino(contender: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """openvino-genai; its streamer is called after every token."""
    import numpy as np
    import openvino
    import openvino_genai

    # it would remember the prompt from the run before, and have no prefill to do
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": contender["threads"], "scheduler_config": scheduler}
    pipeline = openvino_genai.LLMPipeline(contender["path"], "CPU", options)

    def run(prompt_ids: list[int], new_tokens: int) -> dict[str, Any]:
        at_s: list[float] = []

        class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: Any) -> Any:
                at_s.append(time.perf_counter())
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        prompt, start_s = openvino.Tensor(np.array([prompt_ids])), time.perf_counter()
        ids = [int(token) for token in pipeline.generate(prompt, config, Clock()).tokens[0]]
        return result(ids, at_s[0] - start_s, at_s[-1] - at_s[0], new_tokens)

    return run, {"weight_bytes": contender["weight_bytes"], "version": openvino_genai.__version__}


def peer_facts(contender: Mapping[str, Any]) -> dict[str, Any]:
    """What `peer_models.py` has written down about a model that it made."""
    path = Path(contender["path"])
    return dict(json.loads((path / "benchmark.json").read_text(encoding="utf-8")))


def _token_texts(folder: Path) -> dict[int, str]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {row["id"]: row["content"] for row in tokenizer["added_tokens"]}
    return {**{token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}, **added}


MAKERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Run, dict[str, Any]]]] = {
    "generate": make_generate,
    "llminfer": make_llminfer,
    "llama.cpp": make_llama_cpp,
    "onnxruntime": make_onnxruntime,
    "ctranslate2": make_ctranslate2,
    "openvino": make_openvino,
}

if __name__ == "__main__":
    main()
