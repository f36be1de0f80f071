"""The words every other module uses. Nothing here imports anything of this project."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Precision(IntEnum):
    """What a token gets of an expert, in increasing order, so that the highest of several wishes is their `max`."""

    SKIP = 0
    LOW = 1
    HIGH = 2

    @property
    def word(self) -> str:
        return self.name.lower()


class ExpertId(NamedTuple):
    """One routed expert: `layer` counts MoE layers from 0 (dense layers are not counted)."""

    layer: int
    expert: int
