"""Run the native engine's tests under the address and undefined-behaviour sanitizers: `make sanitize`.

The library is built with them, and their runtime is loaded before Python, which was not. What they find
ends the process with a report. Leaks are not looked for: Python keeps much to its end.

    python scripts/test_sanitized.py [arguments of pytest]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

TESTS = ("tests/engine/test_native.py", "tests/engine/test_threads.py")
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
# numerical tests take the compiler's own rounding; one processor's instructions are enough
FLAGS = f"-march=native {SANITIZERS}"


def main(arguments: list[str]) -> int:
    """Run the tests; returns pytest's exit code."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        print("the sanitizers need g++ or clang++", file=sys.stderr)
        return 1
    name = "libclang_rt.asan.so" if "clang" in compiler else "libasan.so"
    asked = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    cxx = subprocess.run([compiler, "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True)
    environment = {
        "CXX": compiler,
        "LLMINFER_NATIVE_FLAGS": FLAGS,
        # libstdc++ beside it, since the runtime looks for its functions when the process starts
        "LD_PRELOAD": f"{asked.stdout.strip()} {cxx.stdout.strip()}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "0", *arguments, *TESTS]
    return subprocess.run(command, env={**os.environ, **environment}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
