"""The native library's functions and records, as ctypes sees them. The C++ side is the reference."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llminfer.engine.native.build import native_library
from llminfer.errors import LlminferError

FORMATS = {"float32": 0, "float16": 1, "int8": 2, "int4": 3}
NORMS = {"rms": 0, "centred": 1}
STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu": 2}  # by transformers' names


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class MatrixRecord(Structure):
    """A packed matrix: `rows` × `columns` weights, and a bias or null."""

    _fields_ = [
        *_fields(c_int32, "format unused"),
        *_fields(c_int64, "rows columns"),
        *_fields(c_void_p, "data bias"),
    ]


class LayerRecord(Structure):
    """One layer: its matrices, the weights of its norms, and where its cache is."""

    _fields_ = [
        *_fields(MatrixRecord, "query key value output gate up down"),
        *_fields(c_void_p, "attention_in attention_out mlp_in mlp_out query_norm key_norm rotation keys values"),
        *_fields(c_int64, "capacity begin end window"),
    ]


class ModelRecord(Structure):
    """The whole decoder."""

    _fields_ = [
        *_fields(c_int64, "hidden heads kv_heads head_dim intermediate vocabulary layers rotated"),
        ("layer", POINTER(LayerRecord)),
        ("head", MatrixRecord),
        ("embedding_rows", POINTER(MatrixRecord)),
        ("embedding", c_void_p),
        ("known", c_int64),
        ("final_norm", c_void_p),
        *_fields(c_float, "embedding_scale norm_epsilon norm_offset attention_scale attention_cap logit_cap"),
        *_fields(c_float, "logit_scale residual_scale clip"),
        *_fields(c_int32, "norm activation norms_whole_projection embedding_type"),
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


class Library(SimpleNamespace):
    """The functions of a compiled library, by the names above."""

    def __init__(self, path: str) -> None:
        super().__init__()
        loaded = ctypes.CDLL(path)
        for name, (returns, takes) in _FUNCTIONS.items():
            function = getattr(loaded, f"llminfer_{name}")
            function.restype, function.argtypes = returns, list(takes)
            setattr(self, name, function)
        sizes = (c_int64 * len(_RECORDS))()
        self.record_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(record) for record in _RECORDS]:
            raise LlminferError(f"{path} has records of other sizes", hint="delete it; the next run builds it again")


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
        raise LlminferError(f"cannot load {path}: {error}", hint="delete it; the next run builds it again") from error
    loaded.threads(torch.get_num_threads())
    # on the threads of torch's GNU OpenMP, where torch has one
    for openmp in sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))[:1]:
        threads = ctypes.CDLL(str(openmp))
        functions = (threads.GOMP_parallel, threads.omp_get_num_threads)
        loaded.openmp(*(ctypes.cast(function, c_void_p) for function in functions))
    return loaded


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers are; None stays None. The caller keeps the tensor alive."""
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only contiguous tensors on the CPU can be handed to the native library")
    return int(tensor.data_ptr())
