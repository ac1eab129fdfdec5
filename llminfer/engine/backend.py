"""What carries out a loaded model's arithmetic: other weight formats, the compiler, our own step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from llminfer.engine.forward.protocol import ForwardFactory
from llminfer.engine.forward.torch_compile import check_compiled
from llminfer.engine.models.protocols import CausalLM, Config
from llminfer.engine.native.build import require_compiler
from llminfer.engine.weights.packed_linear import TORCH_KERNELS, Kernels
from llminfer.engine.weights.packing import Packing, held_parts, make_float32, pack_model
from llminfer.errors import UnsupportedArchitecture, UsageError
from llminfer.params import Execution
from llminfer.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a model was made ready with: how to feed it, where not in its own way, and notes for the user."""

    factory: ForwardFactory | None = None
    notes: tuple[str, ...] = ()


def check_execution(execution: Execution, device: torch.device, config: Config, source: str) -> None:
    """Refuse what cannot be, before any weights are read.

    Args:
        device: the device chosen.
        source: names the model in errors.

    Raises:
        UsageError: for weights in a format that the device has no kernels for, or kernels that cannot
            be built here.
        UnsupportedArchitecture: for a model that cannot be compiled, or other formats of weights that
            are quantized already.
    """
    if execution.compiled:
        check_compiled(config, source)
    if execution.weights_format is None:
        return
    option = f"--weights {execution.weights}" if execution.weights is not None else f"--engine {execution.engine}"
    if device.type != "cpu":
        raise UsageError(f"{option} needs the CPU, not {device}", hint="add --device cpu")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedArchitecture(
            f"{source} is already quantized, so {option} cannot be used", hint=f"drop {option}"
        )
    if execution.engine == "native":
        require_compiler()


def load_dtype(execution: Execution, *, stated: torch.dtype, chosen: torch.dtype) -> torch.dtype:
    """The element type to read weights in: that of a 16-bit checkpoint where they are packed to 16 bits or fewer."""
    narrower = execution.weights not in (None, "float32") and stated in (torch.bfloat16, torch.float16)
    return stated if narrower else chosen


def prepare_execution(model: CausalLM, execution: Execution, source: str) -> Prepared:
    """Change a loaded model to what `execution` asks for; `source` names it in errors.

    Raises:
        UnsupportedArchitecture: when the model cannot be run so.
        LlminferError: when the native kernels cannot be built.
    """
    if execution.compiled:
        check_compiled(model.config, source, known=type(model))
    if execution.engine == "native":
        return _native(model, execution.weights_format or "float32", source)
    if execution.weights is None:
        return Prepared()
    packing = _pack(model, execution.weights, TORCH_KERNELS)
    return Prepared(notes=tuple(_packing_notes(model, packing, execution.weights)))


def _native(model: CausalLM, weights_format: str, source: str) -> Prepared:
    # what compiles and loads C++ is wanted here alone
    from llminfer.engine.native.decoder import Decoder, why_not_native
    from llminfer.engine.native.forward import NativeForward
    from llminfer.engine.native.library import library
    from llminfer.engine.native.packed import NATIVE_KERNELS

    vectors = library().vectors().decode()
    packing = _pack(model, weights_format, NATIVE_KERNELS)
    notes = tuple(_packing_notes(model, packing, weights_format))
    why = why_not_native(model.config) or ("not all of its linear layers are packed" if packing.left else None)
    if why is not None:
        return Prepared(notes=(*notes, f"{source} has no native step ({why}): its matrices alone are native"))
    notes = (*notes, f"native step with {vectors} instructions, for the growing cache")
    return Prepared(factory=partial(NativeForward, decoder=Decoder(model)), notes=notes)


def _pack(model: CausalLM, weights_format: str, kernels: Kernels) -> Packing:
    packing = pack_model(model, weights_format, kernels)
    make_float32(model)
    return packing


def _packing_notes(model: CausalLM, packing: Packing, weights_format: str) -> Iterator[str]:
    layers = f"{packing.layers} linear layer{'s' if packing.layers != 1 else ''}"
    before, after = format_bytes(packing.before_bytes), format_bytes(packing.after_bytes)
    yield f"weights {weights_format}: {layers}, {before} before and {after} now"
    parts = [(name.replace("_", " "), held) for name, held in held_parts(model).items() if held]
    yield f"held: {', '.join(f'{name} {format_bytes(held)}' for name, held in parts)}"
    if packing.copied_bytes:
        copied = format_bytes(packing.copied_bytes)
        yield f"the embedding shares its weight with the output layer, and holds {copied} of it besides"
    for reason in dict.fromkeys(packing.left.values()):
        names = [name for name, why in packing.left.items() if why == reason]
        yield f"{len(names)} linear layers are not packed, {names[0]} among them: {reason}"
