"""Whether a calibration finds room, asked before hours of work."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from apex_engine.calibration.recorder import Recorder
from apex_engine.calibration.settings import Settings
from apex_engine.checkpoint.atomic import check_writable
from apex_engine.checkpoint.calibration import CALIBRATION
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import parse_memory
from apex_engine.errors import ApexError, human
from apex_engine.memory.probe import free_memory


def check_room(folder: Path, manifest: Manifest, settings: Settings) -> None:
    """Raises ApexError where the second moments do not fit in memory beside the model, or on the disk."""
    numbers = sum(math.prod(shape) for shape in Recorder.shapes(manifest, settings.block).values())
    needed, free = 4 * numbers * len(manifest.layers), free_memory(torch.device("cpu"))
    held = manifest.dense_bytes
    held += parse_memory(
        settings.memory, manifest.experts * len(manifest.layers) * manifest.strides[manifest.words.top]
    )
    if needed + held > 0.9 * free:
        raise ApexError(
            f"the second moments in blocks of {settings.block} take {human(needed)} and the model {human(held)}, and "
            f"{human(free)} of memory are free: a smaller --block takes less (1: what --low-method clip needs)"
        )
    check_writable(folder / CALIBRATION)
    room = shutil.disk_usage(folder).free
    if needed + (1 << 20) > room:
        raise ApexError(
            f"{folder} needs {human(needed)} more for the second moments, and its disk has {human(room)} free"
        )
