"""What this machine has: devices, and bytes that are free."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from apex_engine.errors import ApexError


def parse_device(name: str) -> torch.device:
    """Raises ApexError where torch has no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ApexError(f"unknown device {name}: use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ApexError(
            f"device {name} asked for, but torch sees {torch.cuda.device_count()} CUDA devices here: use --device cpu, or "
            "install a CUDA build of torch"
        )
    return device


def free_memory(device: torch.device) -> int:
    """Bytes that can be had now: of the GPU, or of this machine and the control groups the process is in."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # not where nothing but the device's memory is asked for

    return min(psutil.virtual_memory().available, *(free_in(*group) for group in control_groups()))


def control_groups(root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """The folders of the memory control groups that this process is in, outermost first, and whether they are of version 1.

    `root`: of the file system, for tests.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        first = "memory" in controllers.split(",")
        top = mount / "memory" if first else mount
        if first or not controllers:
            here = top / path.lstrip("/")
            # Inside a container the path may be that of the host: then only the top is to be seen, and is our own.
            folders = [folder for folder in (here, *here.parents) if folder.is_relative_to(top) and folder.is_dir()]
            found += [(folder, first) for folder in reversed(folders)]
    return found


def free_in(group: Path, first: bool) -> float:
    """Bytes that a control group has left: its limit less what it uses, but for the file cache, which makes room. Infinite where
    it has no limit. `first`: it is of version 1."""
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    try:
        most, now = int((group / limit).read_text()), int((group / used).read_text())
        stat = dict(line.split()[:2] for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit reads "max"
        return math.inf
    # Of version 1 the counts without "total_" leave out the groups below.
    names = ("total_active_file", "total_inactive_file") if first else ("active_file", "inactive_file")
    return most - now + sum(int(stat.get(name, 0)) for name in names)


def automatic_memory(device: torch.device) -> int:
    """Bytes that `device_memory="auto"` takes."""
    return free_memory(device) * 9 // 10
