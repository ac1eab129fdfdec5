"""Run the tests that touch kernels, packing and predictions as on lesser processors: `make capabilities`.

torch, the libraries under it and our native engine can each be told to leave instructions out. The
processor as it is has had its turn in `make test`; here come those below it, each in a process of its own.

    python scripts/test_capabilities.py [arguments of pytest]
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import torch

TESTS = (
    "tests/engine/weights/test_packed_linear.py",
    "tests/engine/test_native.py",
    "tests/engine/weights/test_upcast.py",
    "tests/engine/kv_cache/test_growing.py",
    "tests/cli/test_weights.py",
    "tests/cli/test_native.py",
    "tests/cli/test_caches.py",
)
_LEAST = {"ATEN_CPU_CAPABILITY": "default", "LLMINFER_NATIVE_FLAGS": "-DLLMINFER_PORTABLE"}
# from the least on: what a process is told to be such a processor
PROCESSORS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "x86_64": {
        "default": {**_LEAST, "ONEDNN_MAX_CPU_ISA": "SSE41"},
        "avx2": {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
            "LLMINFER_NATIVE_FLAGS": "-march=x86-64-v3",
        },
        "avx512": {},
    },
    "aarch64": {"default": _LEAST, "sve256": {}},
}


def lesser() -> dict[str, Mapping[str, str]]:
    """The processors below this one; the least of all is always among them, for the native engine."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    known = PROCESSORS.get(machine, {"default": _LEAST})
    own = torch.backends.cpu.get_cpu_capability().lower()
    below = list(known)[: list(known).index(own)] if own in known else []
    return {name: known[name] for name in below or ["default"]}


def main(arguments: list[str]) -> int:
    """Run the tests as on each; returns the number of runs that failed."""
    failed = 0
    for name, environment in lesser().items():
        print(f"as on a processor with {name}: {environment}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *arguments, *TESTS]
        failed += subprocess.run(command, env={**os.environ, **environment}).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
