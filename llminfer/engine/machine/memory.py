"""How much memory a device has left, as far as it says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import torch

# of a cgroup of each version: its folder, the files of limit and use, and what of the use can be taken back
_CGROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated, None where nothing says how many."""
    return _READERS[device.type](device) if device.type in _READERS else None


def cpu_bytes(root: Path = Path("/")) -> int | None:
    """What Linux can give without swapping, and the process's control groups let it take; None elsewhere."""
    fields = _fields(root / "proc/meminfo")
    available = [fields["MemAvailable:"] * 1024] if "MemAvailable:" in fields else []
    return max(min((*available, *_cgroup_bytes(root))), 0) if available else None


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """What each control group with a limit has left, the process's own and those around it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        for version in _CGROUPS.keys() & set(controllers.split(",")):
            mount, limit_file, use_file, cached = _CGROUPS[version]
            own = PurePosixPath(path.lstrip("/"))
            for group in (root / mount / folder for folder in (own, *own.parents)):
                limit, used = _read(group / limit_file).strip(), _read(group / use_file).strip()
                if limit.isdecimal() and used.isdecimal():
                    yield int(limit) - int(used) + _fields(group / "memory.stat").get(cached, 0)


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file of lines with a name and a number."""
    rows = (line.split() for line in _read(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _cuda_bytes(device: torch.device) -> int:
    """What the driver has, and what torch has from it and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _mps_bytes(device: torch.device) -> int:
    return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())


_READERS: Mapping[str, Callable[[torch.device], int | None]] = {
    "cpu": lambda device: cpu_bytes(),
    "cuda": _cuda_bytes,
    "mps": _mps_bytes,
}
