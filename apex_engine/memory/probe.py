"""What this machine has: devices, and bytes that are free."""

from __future__ import annotations

import os
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
    """Bytes that can be had now: of the GPU, or of this machine and the control group the process is in."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable:"]) << 10  # what the page cache holds can be had too
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, KeyError, ValueError):  # no limit reads "max"
        pass
    return free


def automatic_memory(device: torch.device) -> int:
    """Bytes that `device_memory="auto"` takes."""
    return free_memory(device) * 9 // 10
