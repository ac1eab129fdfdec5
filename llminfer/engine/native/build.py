"""Compiling the native engine, once for each machine, into the user's cache folder.

The library is compiled for the very processor that it runs on, so it is kept under a key of its
sources, the compiler, the flags and the processor's features: another processor that shares the folder
builds its own. Needs a C++17 compiler: `CXX`, g++, clang++, c++, or the one that the PyPI package
`ziglang` brings (`pip install 'llminfer[native]'`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from llminfer.engine.machine.disk_cache import CACHE_HINT, cache_folder
from llminfer.errors import LlminferError, UsageError

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi")
# in place of the flags for this processor: another one, or sanitizers
_FLAGS_VARIABLE = "LLMINFER_NATIVE_FLAGS"
_COMPILERS = ("g++", "clang++", "c++")
_NO_COMPILER = "install g++ or clang++, or: pip install 'llminfer[native]'"


def find_compiler() -> tuple[str, ...] | None:
    """The command that compiles C++ here, None when there is none."""
    chosen = os.environ.get("CXX")
    if chosen:
        return tuple(shlex.split(chosen))
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is not None:
        return (found,)
    return (sys.executable, "-m", "ziglang", "c++") if importlib.util.find_spec("ziglang") is not None else None


def require_compiler() -> tuple[str, ...]:
    """The command that compiles C++ here.

    Raises:
        UsageError: when there is none.
    """
    compiler = find_compiler()
    if compiler is None:
        raise UsageError("the native engine needs a C++ compiler, and there is none here", hint=_NO_COMPILER)
    return compiler


def native_library(*, portable: bool = False) -> Path:
    """The compiled library, built now if it was not before.

    Args:
        portable: without the processor's vector instructions, for tests.

    Raises:
        UsageError: when there is no compiler.
        LlminferError: when it fails, or the cache folder cannot be written.
    """
    command = [*require_compiler(), *_FLAGS, *(("-DLLMINFER_PORTABLE",) if portable else _processor_flags())]
    target = cache_folder() / "native" / _key(command) / "engine.so"
    try:
        target.parent.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (target.parent.parent, target.parent):
            _make_private(folder)
        with FileLock(target.with_suffix(".lock")):
            if not (target.exists() and _is_private(target)):
                _compile(command, target)
    except OSError as error:
        raise LlminferError(f"cannot write to the cache {target.parent}: {error.strerror}", hint=CACHE_HINT) from error
    return target


def _make_private(folder: Path) -> None:
    """Make a folder where nobody else can put code, or close one of ours to others."""
    folder.mkdir(exist_ok=True, mode=0o700)
    if not _is_own(folder):
        reason = f"{folder} belongs to another user, so no code is loaded from it"
        raise LlminferError(reason, hint="set LLMINFER_CACHE to a folder of your own")
    if not _is_private(folder):
        folder.chmod(0o700)


def _is_own(path: Path) -> bool:
    """Whether a path is this user's and not a link; always so on Windows, where users' folders are closed to others."""
    found = path.lstat()
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode))


def _is_private(path: Path) -> bool:
    """Whether nobody else can have written to it."""
    return _is_own(path) and (not hasattr(os, "getuid") or not path.lstat().st_mode & 0o022)


def _compile(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        whole = [*command, str(_SOURCES / "engine.cpp"), "-o", str(made)]
        try:
            result = subprocess.run(whole, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except OSError as error:
            reason = f"cannot run the C++ compiler {command[0]}: {error.strerror}"
            raise UsageError(reason, hint=_NO_COMPILER) from error
        if result.returncode != 0:
            said = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            reason = said[0].strip() if said else f"exit code {result.returncode}"
            raise LlminferError(f"{command[0]} cannot build the native engine: {reason}", hint="set CXX to another")
        made.chmod(0o700)
        os.replace(made, target)


def _processor_flags() -> tuple[str, ...]:
    chosen = os.environ.get(_FLAGS_VARIABLE)
    if chosen is not None:
        return tuple(shlex.split(chosen))
    return ("-mcpu=native",) if platform.machine().lower() in ("aarch64", "arm64") else ("-march=native",)


def _key(command: list[str]) -> str:
    """What the library depends on, as a short name."""
    hasher = hashlib.sha256()
    for part in (*command, _compiler_version(command[0]), platform.machine(), _processor_features()):
        hasher.update(part.encode() + b"\0")
    for source in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        hasher.update(source.read_bytes())
    return hasher.hexdigest()[:32]


def _compiler_version(compiler: str) -> str:
    """When the compiler's file last changed: asking it for its version takes longer than all else here."""
    path = shutil.which(compiler)
    return str(os.stat(path).st_mtime_ns) if path is not None else ""


def _processor_features() -> str:
    """What the first processor can do, in the system's words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
