"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers


def machine(device: torch.device | None = None) -> str:
    """Processor, cores, the CUDA device if it is used, and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    parts = [names[0] if names else platform.machine(), f"{os.cpu_count()} cores"]
    if device is not None and device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join([*parts, f"torch {torch.__version__}", f"transformers {transformers.__version__}"])
