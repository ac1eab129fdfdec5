"""Compare llama.cpp's own allocation log with `kv-size --runtime llama.cpp`.

    python benchmarks/llamacpp_kv.py [FILE.gguf]

Needs llama-cpp-python (not a dependency of llminfer) and a GGUF file: the built-in model's when
none is named. llama.cpp logs MiB with two decimals, so that is how far the comparison reaches.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import llama_cpp

from llminfer.engine.checkpoints.builtin import DEFAULT_MODEL_INSTALL_COMMAND, find_default_model
from llminfer.kv.footprint import footprint
from llminfer.kv.gguf_layers import read_gguf_model

CONTEXTS = (256, 1000, 4096, 8192)
TYPES = {"float16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
BUFFER_SIZE = re.compile(r"(?:KV|RS) buffer size =\s+([0-9.]+) MiB")


def main() -> int:
    """Print a line per context and type; exit with 1 when one of them differs."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else find_default_model()
    if path is None:
        raise SystemExit(f"no GGUF file: name one, or {DEFAULT_MODEL_INSTALL_COMMAND}")
    model = read_gguf_model(path)
    agree = True
    print(f"{path.name}, llama-cpp-python {llama_cpp.__version__}")
    print("context  type     predicted bytes  predicted MiB  logged MiB")
    for dtype, ggml_type in TYPES.items():
        for context in CONTEXTS:
            predicted = footprint(model, tokens=context, runtime="llama.cpp", dtype=dtype).total_bytes
            logged = logged_mib(path, context, ggml_type)
            same = abs(predicted / 1024**2 - logged) < 0.0101
            agree &= same
            mib = f"{predicted / 1024**2:13.2f}  {logged:10.2f}"
            print(f"{context:7}  {dtype:7}  {predicted:15}  {mib}  {'=' if same else '≠'}")
    return 0 if agree else 1


def logged_mib(path: Path, context: int, ggml_type: int) -> float:
    """The sum of the cache buffers that llama.cpp logs while it makes a context of this size."""
    lines: list[bytes] = []
    keep = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text))
    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    # swa_full: the library allocates windows in full unless told not to, as llama-server and llama-cli do
    options = {"type_k": ggml_type, "type_v": ggml_type, "flash_attn": True, "swa_full": False, "verbose": True}
    llama = llama_cpp.Llama(str(path), n_ctx=context, **options)
    llama.close()
    found = BUFFER_SIZE.findall(b"".join(lines).decode("utf-8", "replace"))
    if not found:
        raise SystemExit("llama.cpp logged no buffer size: has its wording changed?")
    return sum(float(size) for size in found)


if __name__ == "__main__":
    sys.exit(main())
