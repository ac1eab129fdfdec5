"""Where a model runs and in which element type."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping

import torch

from llminfer.errors import InvalidParams, ModelNotAvailable
from llminfer.params import DEVICE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# torch has an error class of its own for some of them only
_OUT_OF_MEMORY_TEXTS = (
    *("DefaultCPUAllocator", "MPS backend out of memory"),
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)


def available_devices() -> list[str]:
    """The names that `choose_device` accepts on this machine, `auto` apart."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *cuda, *mps]


def set_threads(count: int) -> None:
    """Let torch, and the native engine after it, use so many threads of the processor from now on."""
    torch.set_num_threads(count)


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` takes the first of CUDA, MPS and CPU that is there.

    Raises:
        InvalidParams: for a name that is not a device's.
        ModelNotAvailable: for a device that this machine lacks; never falls back in silence.
    """
    if not DEVICE.fullmatch(name):
        raise InvalidParams(f"unknown device {name!r}", hint="one of auto, cpu, cuda, cuda:N, mps")
    present = available_devices()
    if name == "auto":
        return torch.device(next((device for device in ("cuda:0", "mps") if device in present), "cpu"))
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in present:
        raise ModelNotAvailable(f"there is no device {name} here", hint=f"present: {', '.join(present)}")
    return torch.device(wanted)


def choose_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> tuple[torch.dtype, str | None]:
    """The element type to load weights in, and a note when `auto` leaves the checkpoint's own.

    `auto` is the checkpoint's type where the device computes it fast, else float32 on a CPU and
    float16 on a GPU without bfloat16.

    Raises:
        InvalidParams: for an unknown name, or a type that the device cannot compute.
    """
    if name != "auto":
        if name not in DTYPES:
            raise InvalidParams(f"unknown dtype {name!r}", hint=f"one of auto, {', '.join(DTYPES)}")
        if DTYPES[name] is torch.bfloat16 and not _computes_bfloat16(device):
            raise InvalidParams(f"{device} cannot compute in bfloat16", hint="try --dtype float16 or float32")
        return DTYPES[name], None
    if checkpoint not in DTYPES.values():  # float64, or an 8-bit type that only quantized layers compute in
        return torch.float32, f"float32, since the checkpoint's {_short(checkpoint)} cannot be computed in"
    if checkpoint is torch.float32 or computes_fast(checkpoint, device):
        return checkpoint, None
    if device.type == "cpu":
        return torch.float32, f"float32, since this CPU has no fast {_short(checkpoint)}"
    return torch.float16, f"float16, since {device} has no {_short(checkpoint)}"


def computes_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has instructions for a 16-bit type, so that it is no slower than float32."""
    if device.type != "cpu":
        return dtype is not torch.bfloat16 or _computes_bfloat16(device)
    # an older torch cannot tell, so there float32 is what is surely fast
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    wanted = ("avx512_bf16", "amx_bf16", "bf16") if dtype is torch.bfloat16 else ("avx512_fp16", "amx_fp16")
    return any(capabilities.get(name) for name in wanted)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done all it was given; on a CPU nothing waits."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that a device, the CPU included, had no memory left."""
    told = any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
    return told or isinstance(error, torch.OutOfMemoryError | MemoryError)


def device_name(device: torch.device) -> str:
    """The hardware's own name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "mps":
        return f"Apple {platform.processor() or 'GPU'}"
    return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"


def _computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):  # torch asks the current one
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Metal has had the type since macOS 14
    return device.type != "mps" or bool(torch.backends.mps.is_macos_or_newer(14, 0))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
