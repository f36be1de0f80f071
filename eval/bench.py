"""What a report is about: a checkpoint, its engine beside a reference, and what is asked of both."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.eval.pair import Pair

REFERENCE = "reference"  # among the modes: who is asked first


@dataclass(frozen=True)
class Bench:
    args: argparse.Namespace
    folder: Path
    manifest: Manifest
    pair: Pair
    calibration: dict[str, Any] | None
