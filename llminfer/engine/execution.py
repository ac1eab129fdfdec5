"""What carries out a loaded model's arithmetic: other weight formats, the compiler, our own step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from llminfer.engine.compiled import check_compiled
from llminfer.engine.packing import Packing, pack_model
from llminfer.errors import UnsupportedArchitecture, UsageError
from llminfer.params import Execution
from llminfer.units import format_bytes


def check_execution(execution: Execution, device: torch.device, config: Any, source: str) -> None:
    """Refuse what cannot be, before any weights are read.

    Args:
        device: the device chosen.
        source: names the model in errors.

    Raises:
        UsageError: for weights in a format that the device has no kernels for.
        UnsupportedArchitecture: for other formats of weights that are quantized already.
    """
    if execution.weights is None:
        return
    if device.type != "cpu":
        raise UsageError(f"--weights {execution.weights} needs the CPU, not {device}", hint="add --device cpu")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedArchitecture(
            f"{source} is quantized already, so --weights {execution.weights} cannot be", hint="drop --weights"
        )


def load_dtype(execution: Execution, *, stated: torch.dtype, chosen: torch.dtype) -> torch.dtype:
    """The element type to read weights in: that of a 16-bit checkpoint where they are packed to 16 bits or fewer."""
    narrower = execution.weights not in (None, "float32") and stated in (torch.bfloat16, torch.float16)
    return stated if narrower else chosen


def prepare_execution(model: Any, execution: Execution, source: str) -> tuple[str, ...]:
    """Change a loaded model to what `execution` asks for; return notes for the user.

    Args:
        source: names the model in errors.

    Raises:
        UnsupportedArchitecture: when the model cannot be run so.
    """
    if execution.compiled:
        check_compiled(model.config, source, known=type(model))
    if execution.engine != "transformers":
        raise UnsupportedArchitecture(f"{source} cannot be run so yet")
    return () if execution.weights is None else _with_packed_weights(model, execution.weights)


def _with_packed_weights(model: Any, weights_format: str) -> tuple[str, ...]:
    packing = pack_model(model, weights_format)
    model.float()  # what is not packed, where the checkpoint is in 16 bits; packed layers stay as they are
    model.config.dtype = torch.float32
    return tuple(_packing_notes(packing, weights_format))


def _packing_notes(packing: Packing, weights_format: str) -> Iterator[str]:
    layers = f"{packing.layers} linear layer{'s' if packing.layers != 1 else ''}"
    before, after = format_bytes(packing.before_bytes), format_bytes(packing.after_bytes)
    yield f"weights {weights_format}: {layers}, {before} before and {after} now; the other modules stay as they are"
    if packing.copied_bytes:
        copied = format_bytes(packing.copied_bytes)
        yield f"the embedding shares its weight with the output layer, and holds {copied} of it besides"
    for reason in dict.fromkeys(packing.left.values()):
        names = [name for name, why in packing.left.items() if why == reason]
        yield f"{len(names)} linear layers are not packed, {names[0]} among them: {reason}"
