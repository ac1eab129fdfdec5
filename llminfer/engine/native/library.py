"""The native library's functions and records, as ctypes sees them. The C++ side is the reference."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llminfer.engine.native.build import native_library
from llminfer.errors import LlminferError

FORMATS = {"float32": 0, "float16": 1, "int8": 2, "int4": 3}
NORMS = {"rms": 0, "centred": 1}
STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class MatrixRecord(Structure):
    """A packed matrix: `rows` × `columns` weights, and a bias or null."""

    _fields_ = [
        ("format", c_int32),
        ("unused", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    ]


_LAYER_MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
_LAYER_WEIGHTS = ("attention_in", "attention_out", "mlp_in", "mlp_out", "query_norm", "key_norm", "rotation")


class LayerRecord(Structure):
    """One layer: its matrices, the weights of its norms, and where its cache is."""

    _fields_ = [
        *((name, MatrixRecord) for name in _LAYER_MATRICES),
        *((name, c_void_p) for name in _LAYER_WEIGHTS),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("capacity", "begin", "end", "window")),
    ]


_MODEL_SIZES = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "layers", "rotated")
_MODEL_NUMBERS = (
    "embedding_scale",
    "norm_epsilon",
    "norm_offset",
    "attention_scale",
    "attention_cap",
    "logit_cap",
    "logit_scale",
    "residual_scale",
    "clip",
)


class ModelRecord(Structure):
    """The whole decoder."""

    _fields_ = [
        *((name, c_int64) for name in _MODEL_SIZES),
        ("layer", POINTER(LayerRecord)),
        ("head", MatrixRecord),
        ("embedding_rows", POINTER(MatrixRecord)),
        ("embedding", c_void_p),
        ("known", c_int64),
        ("final_norm", c_void_p),
        *((name, c_float) for name in _MODEL_NUMBERS),
        ("norm", c_int32),
        ("activation", c_int32),
        ("norms_whole_projection", c_int32),
        ("embedding_type", c_int32),
    ]


_MATRIX = POINTER(MatrixRecord)
_RECORDS = (MatrixRecord, LayerRecord, ModelRecord)  # as engine.cpp counts them
# name: (what it returns, what it takes)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "record_sizes": (None, (POINTER(c_int64),)),
    "vectors": (c_char_p, ()),
    "threads": (None, (c_int32,)),
    "openmp": (None, (c_void_p, c_void_p)),
    "packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "advise": (None, (c_void_p, c_int64)),
    "pack": (None, (_MATRIX, c_void_p)),
    "rows": (None, (_MATRIX, c_void_p, c_int64, c_void_p)),
    "multiply": (None, (_MATRIX, c_void_p, c_int64, c_void_p)),
    "decoder": (c_void_p, (POINTER(ModelRecord),)),
    "decoder_free": (None, (c_void_p,)),
    "most_tokens": (c_int64, ()),
    "step": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64)),
}


class Library:
    """The functions of a compiled library, by the names above."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        for name, (returns, takes) in _FUNCTIONS.items():
            function = getattr(loaded, f"llminfer_{name}")
            function.restype, function.argtypes = returns, list(takes)
            setattr(self, name, function)
        sizes = (c_int64 * len(_RECORDS))()
        self.record_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(record) for record in _RECORDS]:
            raise LlminferError(f"{path} has records of other sizes", hint="delete it: it is built again")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@cache
def library() -> Library:
    """The library of this machine, compiled if need be, with as many threads as torch has.

    Raises:
        UsageError: when there is no compiler.
        LlminferError: when it cannot be built or loaded.
    """
    path = native_library()
    try:
        loaded = Library(str(path))
    except OSError as error:
        raise LlminferError(f"cannot load {path}: {error}", hint="delete it: it is built again") from error
    loaded.threads(torch.get_num_threads())
    _share_threads(loaded)
    return loaded


def _share_threads(loaded: Library) -> None:
    """Let the library run on the threads of torch's GNU OpenMP, where torch has one."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        openmp = ctypes.CDLL(str(path))
        functions = (openmp.GOMP_parallel, openmp.omp_get_num_threads)
        loaded.openmp(*(ctypes.cast(function, c_void_p) for function in functions))
        return


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers are; None stays None. The caller keeps the tensor alive."""
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only contiguous tensors on the CPU can be handed to the native library")
    return int(tensor.data_ptr())
