"""How long a local `kv-size` takes, process start included, as a ratio to a bare `python -c pass`.

    python benchmarks/startup.py [ROUNDS]

The rounds of both are interleaved, so that a busy machine slows both; medians are printed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "kv-size --bytes": ["-m", "llminfer", "kv-size", "llama-3.1-8b", "-N", "8192", "--bytes"],
    "kv-size, a table": ["-m", "llminfer", "kv-size", "llama-3.1-8b", "-N", "8192"],
    "kv-size, all runtimes": ["-m", "llminfer", "kv-size", "gemma-3-27b", "-N", "1k..64k*2", "--runtime", "all"],
}


def main() -> None:
    """Print the median and the ratio of each command."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            times[name].append(time.perf_counter() - start)
    bare = statistics.median(times["python -c pass"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:24} {median * 1e3:7.1f} ms  {median / bare:5.1f} ×")


if __name__ == "__main__":
    main()
