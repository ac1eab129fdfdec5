"""Contenders resident in processes of their own, run one at a time in rounds."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

_PROBE_BYTES = 256 * 1024**2  # far more than any cache holds
_PROBE_TRIES = 5
_LAST_WORDS_BYTES = 4096
# threads of OpenMP and other pools spin for a while after their last work
PAUSE_S = 0.3

Say = Callable[[str], None]


class WorkerFailed(Exception):
    """A contender that cannot go on, in one line."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """A running process, the file that takes its standard error, and what it has written so far."""

    name: str
    process: subprocess.Popen[bytes]
    talk: IO[bytes]
    facts: dict[str, Any] = field(default_factory=dict)
    unread: bytes = b""
    idle_s: float = 0.0
    idle_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one contender.

    `prefill_s` lasts until the first new token is known, `decode_s` from there until the last is.
    """

    tokens: tuple[int, ...]
    prefill_s: float
    decode_s: float


@dataclass(slots=True, kw_only=True)
class Session:
    """What the counted rounds have measured: a run a round for each that lives, and the machine.

    `busy_cores` are those that were busy in a moment of each round when no contender ran.
    """

    bandwidths_bytes_per_s: list[float] = field(default_factory=list)
    busy_cores: list[float] = field(default_factory=list)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def start(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Worker:
    """Start a worker; it does nothing until it is asked."""
    talk = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the worker)
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=talk,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for us, and we end it
        )
    except OSError as error:
        talk.close()
        raise WorkerFailed(f"{command[0]}: {error.strerror}") from error
    return Worker(name=name, process=process, talk=talk)


def ask(worker: Worker, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Send a request and wait for its reply.

    Raises:
        WorkerFailed: when it says so, dies, writes something else, or takes too long.
    """
    assert worker.process.stdin is not None
    try:
        worker.process.stdin.write(json.dumps(request).encode() + b"\n")
        worker.process.stdin.flush()
    except OSError as error:
        raise WorkerFailed(_last_words(worker)) from error
    line = _read_line(worker, timeout_s)
    try:
        reply = json.loads(line)
    except ValueError as error:
        raise WorkerFailed(f"does not keep to the protocol: {line[:60]!r}") from error
    if not isinstance(reply, dict):
        raise WorkerFailed(f"does not keep to the protocol: {line[:60]!r}")
    if "error" in reply:
        raise WorkerFailed(str(reply["error"]))
    return reply


def stop(worker: Worker) -> None:
    """End a worker, whatever it is doing."""
    with suppress(OSError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout, worker.talk):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _read_line(worker: Worker, timeout_s: float) -> bytes:
    assert worker.process.stdout is not None
    descriptor, end_s = worker.process.stdout.fileno(), time.monotonic() + timeout_s
    while b"\n" not in worker.unread:
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise WorkerFailed(f"took longer than {timeout_s:g} s")
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            raise WorkerFailed(_last_words(worker))
        worker.unread += chunk
    line, _, worker.unread = worker.unread.partition(b"\n")
    return line


def _last_words(worker: Worker) -> str:
    """How a worker has ended, and the last line of its standard error."""
    try:
        code = worker.process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return "closed its output"
    ended = f"ended with exit code {code}"
    if code < 0:
        with suppress(ValueError):
            ended = f"ended by {signal.Signals(-code).name}"
    worker.talk.seek(max(0, worker.talk.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
    lines = [line.strip() for line in worker.talk.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f"{ended}: {lines[-1]}" if lines else ended


# rounds


def run_rounds(
    workers: Sequence[Worker],
    *,
    rounds: int,
    prompt_ids: Sequence[int],
    new_tokens: int,
    timeout_s: float,
    probe: Callable[[], float],
    say: Say,
    pause_s: float = PAUSE_S,
) -> Session:
    """Run every worker once a round, in an order that rotates; round 0 is not counted.

    A worker that fails is dropped with its reason, and the others go on.
    """
    session, alive = Session(), {worker.name: worker for worker in workers}
    request = {"do": "run", "prompt_ids": list(prompt_ids), "new_tokens": new_tokens}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "a first round, which is not counted")
        time.sleep(pause_s)
        busy = busy_cores(pause_s)
        bandwidth = probe()
        if number:
            session.busy_cores += [busy] if busy is not None else []
            session.bandwidths_bytes_per_s.append(bandwidth)
        names = list(alive)
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            others = [worker for worker in alive.values() if worker.name != name]
            time.sleep(pause_s)
            try:
                run = _run(alive[name], others, request, timeout_s)
            except WorkerFailed as failure:
                say(f"skipped {name}: {failure}")
                session.skipped[name] = str(failure)
                session.runs.pop(name, None)
                stop(alive.pop(name))
                continue
            if number:
                session.runs.setdefault(name, []).append(run)
    return session


def _run(worker: Worker, others: Sequence[Worker], request: Mapping[str, Any], timeout_s: float) -> Run:
    """One run of one worker, while it is noted whether the others rest."""
    used_s, began_s = _cpu_s(others), time.monotonic()
    reply = ask(worker, request, timeout_s=timeout_s)
    _note_idle(others, used_s, began_s)
    try:
        run = Run(tokens=tuple(reply["tokens"]), prefill_s=reply["prefill_s"], decode_s=reply["decode_s"])
    except (KeyError, TypeError) as error:
        raise WorkerFailed(f"does not keep to the protocol: {error}") from error
    worker.facts["peak_bytes"] = reply.get("peak_bytes")
    return run


def _cpu_s(workers: Sequence[Worker]) -> dict[str, float]:
    """Processor seconds of each so far, where the kernel tells."""
    used = {}
    for worker in workers:
        with suppress(OSError, IndexError, ValueError):
            text = Path(f"/proc/{worker.process.pid}/stat").read_text(encoding="ascii", errors="replace")
            fields = text.rpartition(")")[2].split()
            used[worker.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _note_idle(workers: Sequence[Worker], before: Mapping[str, float], began_s: float) -> None:
    """Add to each waiting worker what it used while it should have used nothing."""
    after, passed_s = _cpu_s(workers), time.monotonic() - began_s
    for worker in workers:
        if worker.name in before and worker.name in after:
            worker.idle_s += passed_s
            worker.idle_cpu_s += after[worker.name] - before[worker.name]


def busy_cores(over_s: float) -> float | None:
    """Cores that are busy while we wait so long, with whatever; None where the kernel does not say."""
    begin = _busy_s()
    time.sleep(over_s)
    end = _busy_s()
    return None if begin is None or end is None or over_s <= 0 else (end - begin) / over_s


def _busy_s() -> float | None:
    """Seconds that all cores have worked so far: what /proc/stat counts, less idle and waiting for disks."""
    with suppress(OSError, ValueError, IndexError):
        ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return None


def make_probe(threads: int) -> Callable[[], float]:
    """A probe of the memory: bytes/s at which so many threads read, the best of some tries.

    Each thread takes the greatest of its share of 256 MiB of integers, which costs less than reading them.
    """
    numbers = np.arange(_PROBE_BYTES // 4, dtype=np.int32)
    shares = np.array_split(numbers, threads)
    pool = ThreadPoolExecutor(threads)

    def probe() -> float:
        best_s = float("inf")
        for _ in range(_PROBE_TRIES):
            start_s = time.perf_counter()
            list(pool.map(np.maximum.reduce, shares))
            best_s = min(best_s, time.perf_counter() - start_s)
        return numbers.nbytes / best_s

    return probe


def free_memory_bytes() -> int | None:
    """Memory that programs could still have, None where the kernel does not say."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return None


def worker_command(python: Path | None) -> list[str]:
    """The command of a worker, under another Python where its library lives there."""
    # -P: the folder of the script holds modules of ours that the libraries must not find
    return [str(python or sys.executable), "-P", str(Path(__file__).with_name("worker.py"))]
