"""What is left of a device's memory, read from files and figures that are made up here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llminfer.engine.machine.memory import available_bytes, cpu_bytes

KIB = 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       9000 kB\nMemFree:         100 kB\nMemAvailable:   5000 kB\n"}
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 5000 * KIB),
        # version 2: what an outer group has left counts, and its page cache can be taken back
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "0::/outer/inner\n",
                f"{V2}/outer/inner/memory.max": "max\n",
                f"{V2}/outer/inner/memory.current": "7\n",
                f"{V2}/outer/memory.max": "2000000\n",
                f"{V2}/outer/memory.current": "1500000\n",
                f"{V2}/outer/memory.stat": "anon 5\ninactive_file 300000\n",
            },
            800000,
        ),
        # in a container the path is not there, and the group is the root
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": "1000000\n",
                f"{V2}/memory.current": "1200000\n",
            },
            0,
        ),
        # version 1, beside an empty version 2
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "4:cpu,memory:/docker/x\n0::/\n",
                f"{V1}/memory.limit_in_bytes": "3000000\n",
                f"{V1}/memory.usage_in_bytes": "1000000\n",
                f"{V1}/memory.stat": "inactive_file 1\ntotal_inactive_file 250000\n",
            },
            2250000,
        ),
        ({**MEMINFO, "proc/self/cgroup": "0::/x\n", f"{V2}/x/memory.max": "9223372036854771712\n"}, 5000 * KIB),
        ({**MEMINFO, "proc/self/cgroup": "nonsense\n"}, 5000 * KIB),
    ],
)
def test_a_cpu_has_what_linux_and_every_control_group_leave(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert cpu_bytes(write(tmp_path, files)) == expected


def test_cuda_has_what_the_driver_has_and_what_torch_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name, value in {"mem_get_info": (700, 9000), "memory_reserved": 300, "memory_allocated": 120}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: asked.append(str(device)) or value)
    assert available_bytes(torch.device("cuda:1")) == 700 + 300 - 120
    assert set(asked) == {"cuda:1"}


def test_mps_has_what_is_recommended_less_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 400)
    assert available_bytes(torch.device("mps")) == 600


def test_other_devices_do_not_say() -> None:
    assert available_bytes(torch.device("meta")) is None
