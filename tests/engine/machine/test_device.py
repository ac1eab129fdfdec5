"""Which device and element type a run gets, told by fakes: no GPU is needed here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from llminfer.engine import load as load_module
from llminfer.engine.machine.clock import Clock
from llminfer.engine.machine.device import (
    available_devices,
    choose_device,
    choose_dtype,
    is_out_of_memory,
    synchronizer,
)
from llminfer.engine.sampling.sampler import make_sampler
from llminfer.errors import InvalidParams, ModelNotAvailable
from llminfer.params import SamplingParams
from tests.tiny_checkpoints import byte_level_tokenizer, save_tiny_checkpoint

RunCli = Callable[..., tuple[int, bytes, str]]
CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda:0"), torch.device("mps")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that the machine has these devices and abilities."""
    selected = [0]  # as in torch, what is asked of "the" GPU is answered for the current one

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        selected.append(device.index)
        yield
        selected.pop()

    def pretend(
        *,
        cuda: int = 0,
        mps: bool = False,
        cuda_bf16: bool | dict[int, bool] = True,
        macos_14: bool = True,
        cpu: tuple[str, ...] = (),
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device", current)
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True: cuda_bf16[selected[-1]] if isinstance(cuda_bf16, dict) else cuda_bf16,
        )
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos_14)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(cpu, True), raising=False)

    pretend()
    return pretend


# Devices


def test_auto_takes_cuda_then_mps_then_the_cpu(machine: Callable[..., None]) -> None:
    assert choose_device("auto") == CPU
    machine(mps=True)
    assert choose_device("auto") == MPS
    machine(mps=True, cuda=2)
    assert choose_device("auto") == CUDA
    assert available_devices() == ["cpu", "cuda:0", "cuda:1", "mps"]


def test_devices_by_name(machine: Callable[..., None]) -> None:
    machine(mps=True, cuda=2)
    names = {"cpu": CPU, "cuda": CUDA, "cuda:0": CUDA, "cuda:1": torch.device("cuda:1"), "mps": MPS}
    assert {name: choose_device(name) for name in names} == names


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps"])
def test_a_device_that_is_not_here_is_never_replaced(machine: Callable[..., None], name: str) -> None:
    with pytest.raises(ModelNotAvailable, match=f"there is no device {name} here") as caught:
        choose_device(name)
    assert caught.value.hint == "present: cpu"
    assert caught.value.exit_code == 3


def test_a_gpu_too_many_names_those_present(machine: Callable[..., None]) -> None:
    machine(cuda=2, mps=True)
    with pytest.raises(ModelNotAvailable) as caught:
        choose_device("cuda:9")
    assert caught.value.hint == "present: cpu, cuda:0, cuda:1, mps"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", ["cuda", "cuda:9", "mps"])
def test_a_device_that_is_not_here_on_the_command_line(run_cli: RunCli, tiny_llama: Path, name: str) -> None:
    code, out, err = run_cli("generate", "a", "-m", tiny_llama, "--device", name)
    assert (code, out) == (3, b"")
    assert err == f"error: there is no device {name} here\nhint: present: cpu\n"


@pytest.mark.parametrize("name", ["banana", "", "CPU", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "gpu", "cuda:٣", "xpu"])
def test_what_is_no_device_is_refused_before_anything_is_looked_for(run_cli: RunCli, name: str) -> None:
    code, out, err = run_cli("generate", "a", "-m", "/no/such/model", "--device", name)
    assert (code, out) == (2, b"")
    assert err == f"error: --device {name}: unknown\nhint: one of auto, cpu, cuda, cuda:N, mps\n"
    with pytest.raises(InvalidParams):
        choose_device(name)


@pytest.mark.parametrize("name", ["banana", "float64", "int8", "fp8", "", "Float32"])
def test_what_is_no_dtype_is_refused_before_anything_is_looked_for(run_cli: RunCli, name: str) -> None:
    code, out, err = run_cli("generate", "a", "-m", "/no/such/model", "--dtype", name)
    assert (code, out) == (2, b"")
    assert err == f"error: --dtype {name}: unknown\nhint: one of auto, float32, bfloat16, float16\n"
    with pytest.raises(InvalidParams):
        choose_dtype(name, CPU, torch.float32)


# Element types

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("device", "abilities", "checkpoint", "chosen", "note"),
    [
        (CPU, {}, F32, F32, None),
        (CPU, {}, BF16, F32, "float32, since this CPU has no fast bfloat16"),
        (CPU, {}, F16, F32, "float32, since this CPU has no fast float16"),
        (CPU, {"cpu": ("avx512_bf16",)}, BF16, BF16, None),
        (CPU, {"cpu": ("avx512_bf16",)}, F16, F32, "float32, since this CPU has no fast float16"),
        (CPU, {"cpu": ("amx_bf16",)}, BF16, BF16, None),
        (CPU, {"cpu": ("avx512_fp16",)}, F16, F16, None),
        (CUDA, {}, BF16, BF16, None),
        (CUDA, {}, F16, F16, None),
        (CUDA, {}, F32, F32, None),
        (CUDA, {"cuda_bf16": False}, BF16, F16, "float16, since cuda:0 has no bfloat16"),
        (MPS, {}, BF16, BF16, None),
        (MPS, {"macos_14": False}, BF16, F16, "float16, since mps has no bfloat16"),
        (CPU, {}, torch.float64, F32, "float32, since the checkpoint's float64 cannot be computed in"),
        (
            CUDA,
            {},
            torch.float8_e4m3fn,
            F32,
            "float32, since the checkpoint's float8_e4m3fn cannot be computed in",
        ),
    ],
)
def test_auto_keeps_the_checkpoints_type_where_it_is_fast(
    machine: Callable[..., None],
    device: torch.device,
    abilities: dict[str, object],
    checkpoint: torch.dtype,
    chosen: torch.dtype,
    note: str | None,
) -> None:
    machine(**abilities)
    assert choose_dtype("auto", device, checkpoint) == (chosen, note)


def test_each_gpu_is_asked_for_itself(machine: Callable[..., None]) -> None:
    machine(cuda=2, cuda_bf16={0: True, 1: False})
    assert choose_dtype("auto", CUDA, BF16) == (BF16, None)
    assert choose_dtype("auto", torch.device("cuda:1"), BF16) == (F16, "float16, since cuda:1 has no bfloat16")
    with pytest.raises(InvalidParams, match="cuda:1 cannot compute in bfloat16"):
        choose_dtype("bfloat16", torch.device("cuda:1"), F32)


def test_a_torch_that_cannot_tell_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert choose_dtype("auto", CPU, BF16)[0] is F32


@pytest.mark.parametrize("device", [CUDA, MPS])
def test_a_type_that_the_device_lacks_is_refused_with_others(
    machine: Callable[..., None], device: torch.device
) -> None:
    machine(cuda_bf16=False, macos_14=False)
    with pytest.raises(InvalidParams, match=f"{device} cannot compute in bfloat16") as caught:
        choose_dtype("bfloat16", device, F32)
    assert caught.value.hint == "try --dtype float16 or float32"
    assert choose_dtype("float16", device, F32) == (F16, None)


@pytest.mark.parametrize(("dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_every_type_runs_on_a_cpu_and_sizes_the_cache(
    run_cli: RunCli, tiny_llama: Path, dtype: str, element_bytes: int
) -> None:
    code, out, err = run_cli("generate", "a", "-m", tiny_llama, "-n", "3", "--dtype", dtype, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["dtype"] == dtype
    assert document["device"]["name"] == "cpu"
    kv = document["kv_cache"]
    # K and V, 2 layers of 2 heads of 8
    assert kv["predicted_bytes"] == kv["measured_bytes"] == 2 * 2 * 2 * 8 * kv["cached_tokens"] * element_bytes


def test_device_and_dtype_are_in_the_text(run_cli: RunCli, tiny_llama: Path) -> None:
    code, _, err = run_cli("generate", "a", "-m", tiny_llama, "-n", "2", "--device", "cpu", "--dtype", "bfloat16", "-v")
    assert code == 0
    assert err.splitlines()[0].split(" · ")[1:3] == ["cpu", "bfloat16"]
    model = next(line for line in err.splitlines() if line.startswith("model"))
    assert " · cpu (" in model
    assert " · bfloat16" in model


def test_a_type_that_is_not_the_checkpoints_is_noted(
    run_cli: RunCli, machine: Callable[..., None], tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        dtype="bfloat16",
    )
    folder = save_tiny_checkpoint(tmp_path, config, tokenizer=tokenizer)
    note = "dtype float32, since this CPU has no fast bfloat16"
    code, _, err = run_cli("generate", "a", "-m", folder, "-n", "2")
    assert code == 0
    assert note in err
    code, out, _ = run_cli("generate", "a", "-m", folder, "-n", "2", "--json")
    document = json.loads(out)
    assert document["dtype"] == "float32"
    assert note in document["notes"]
    machine(cpu=("avx512_bf16",))
    document = json.loads(run_cli("generate", "a", "-m", folder, "-n", "2", "--json")[1])
    assert document["dtype"] == "bfloat16"
    assert not any("dtype" in note for note in document["notes"])


@pytest.mark.parametrize(("quantization", "placed"), [({"quant_method": "bitsandbytes"}, {"": CUDA}), (None, None)])
def test_quantized_weights_are_placed_by_name(
    monkeypatch: pytest.MonkeyPatch, quantization: dict[str, str] | None, placed: dict[str, torch.device] | None
) -> None:
    given: dict[str, object] = {}

    class Model:
        def to(self, device: torch.device) -> Model:
            assert device == CUDA
            return self

        def eval(self) -> Model:
            return self

        @classmethod
        def from_pretrained(cls, folder: Path, **arguments: object) -> object:
            given.update(arguments)
            return cls(), {"mismatched_keys": [], "missing_keys": [], "unexpected_keys": []}

    monkeypatch.setattr(load_module, "auto_class", lambda config: Model)
    config = LlamaConfig(quantization_config=quantization) if quantization else LlamaConfig()
    checkpoint = SimpleNamespace(folder=Path("x"), pickled=False)
    load_module._load_weights(checkpoint, config, F16, CUDA, False)  # type: ignore[arg-type]
    assert given["device_map"] == placed


# Waiting for the device, and drawing beside it


@pytest.mark.parametrize(
    ("device", "expected"), [(CUDA, ["cuda:0"]), (torch.device("cuda:1"), ["cuda:1"]), (MPS, ["mps"]), (CPU, [])]
)
def test_a_lap_waits_for_its_device_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, expected: list[str]
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(str(device)))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    clock = Clock(synchronizer(device))
    assert waited == []
    clock.lap()
    assert waited == expected
    clock.elapsed()
    clock.lap()
    assert waited == expected * 2


def test_the_clock_is_read_after_the_wait() -> None:
    now_s = 0.0

    def synchronize() -> None:
        nonlocal now_s
        now_s += 1.5

    clock = Clock(synchronize, lambda: now_s)
    assert [clock.lap(), clock.lap(), clock.elapsed()] == [1.5, 1.5, 3.0]


def test_draws_for_mps_happen_on_the_cpu() -> None:
    # on this machine a generator of MPS could not even be made
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=7)
    on_mps, on_cpu = (make_sampler(params, [1, 2], device) for device in (MPS, CPU))
    logits = torch.randn(20, 1, 100, generator=torch.Generator().manual_seed(0))
    assert [on_mps(row) for row in logits] == [on_cpu(row) for row in logits]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 1.00 MB)"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:20]}",
)
def test_all_ways_to_be_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
