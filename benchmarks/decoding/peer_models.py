"""Make a peer's own file of our model, with the peer's own tool. The decode benchmark calls it, once a file.

    python benchmarks/decoding/peer_models.py MAKER FORMAT --checkpoint FOLDER [--gguf FILE] --out PATH

Runs under the Python that has the peer. What it makes appears at PATH whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

# llama.cpp's numbers for the types of a whole file
GGUF_TYPES = {"float32": 0, "float16": 1, "q4_0": 2, "q8_0": 7}
ONNX_PRECISIONS = {"float32": "fp32", "int4": "int4"}
# tensors that a step reads a row of, or an element
_READ_BY_ROW = {"Gather", "GatherBlockQuantized"}
_READ_BY_ROW_NAMES = {"cos_cache", "sin_cache"}


def make_gguf(source: Path, file_format: str, out: Path) -> None:
    """llama.cpp's own quantizer, on the GGUF file that our checkpoint was converted from."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = GGUF_TYPES[file_format], True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params):
        raise SystemExit(f"llama.cpp cannot make {file_format} of {source.name}")


def make_onnx(source: Path, file_format: str, out: Path) -> None:
    """onnxruntime-genai's own model builder, with its defaults, on our checkpoint."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
    files = ["-i", str(source), "-o", str(out), "-c", str(out.parent / "scratch")]
    subprocess.run([*builder, "-p", ONNX_PRECISIONS[file_format], *files], check=True)
    settings = json.loads((out / "genai_config.json").read_text(encoding="utf-8"))
    # the benchmark asks for a number of tokens and nothing may end it before: the last id is a rare token,
    # and one outside the vocabulary is refused
    settings["model"]["eos_token_id"] = settings["model"]["vocab_size"] - 1
    (out / "genai_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    _write_facts(out, _onnx_bytes(out / "model.onnx"))


def make_ctranslate2(source: Path, file_format: str, out: Path) -> None:
    """ctranslate2's own converter, on our checkpoint; `float32` keeps the weights as they are."""
    from ctranslate2.converters import TransformersConverter

    quantization = None if file_format == "float32" else file_format
    TransformersConverter(str(source)).convert(str(out), quantization=quantization)
    _write_facts(out, (out / "model.bin").stat().st_size)


def _onnx_bytes(file: Path) -> int:
    """Bytes of the tensors that a step reads in full."""
    import onnx
    from onnx.helper import tensor_dtype_to_np_dtype

    graph = onnx.load(str(file), load_external_data=False).graph
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    total = 0
    for tensor in graph.initializer:
        if tensor.name in _READ_BY_ROW_NAMES or readers.get(tensor.name, set()) <= _READ_BY_ROW:
            continue
        elements = 1
        for size in tensor.dims:
            elements *= size
        total += elements * tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return total


def _write_facts(folder: Path, weight_bytes: int) -> None:
    (folder / "benchmark.json").write_text(json.dumps({"weight_bytes": weight_bytes}), encoding="utf-8")


# maker: what it reads, and how
MAKERS: Mapping[str, tuple[str, Callable[[Path, str, Path], None]]] = {
    "gguf": ("gguf", make_gguf),
    "onnx": ("checkpoint", make_onnx),
    "ctranslate2": ("checkpoint", make_ctranslate2),
}


def main() -> None:
    """Make one file or folder in a temporary place beside its own, then move it there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("maker", choices=MAKERS)
    parser.add_argument("format")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    reads, make = MAKERS[arguments.maker]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=arguments.out.parent, prefix=".", suffix=".tmp"))
    try:
        made = temporary / arguments.out.name
        make(getattr(arguments, reads), arguments.format, made)
        made.replace(arguments.out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
