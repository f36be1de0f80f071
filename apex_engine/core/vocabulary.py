"""The words every other module uses. Nothing here imports anything of this project."""

from __future__ import annotations

from collections.abc import Sequence
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


class Words(tuple[str, ...]):
    """What each precision is called, SKIP included: `words[precision]`. Two twins are "low" and "high", one is "high", more go by
    the names of their forms."""

    __slots__ = ()

    @classmethod
    def of(cls, forms: Sequence[str]) -> Words:
        """Of the twins' forms, fewest bytes first."""
        return cls(("skip", *{1: ("high",), 2: ("low", "high")}.get(len(forms), tuple(forms))))

    @property
    def top(self) -> int:
        """The highest precision."""
        return len(self) - 1

    @property
    def twins(self) -> range:
        """All precisions but SKIP, lowest first."""
        return range(1, len(self))
