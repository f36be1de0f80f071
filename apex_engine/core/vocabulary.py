"""The words every other module uses. Nothing here imports anything of this project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Precision = int
"""What a token gets of an expert: the place of a twin in the checkpoint's list, from 1, fewest bytes first; 0 is SKIP. In
increasing order, so that the highest of several wishes is their `max`."""
SKIP: Precision = 0


class ExpertId(NamedTuple):
    """One routed expert: `layer` counts MoE layers from 0 (dense layers are not counted)."""

    layer: int
    expert: int


class Geometry(NamedTuple):
    """What decisions know of a model: MoE layers, experts a layer, and the bytes of an expert at each precision, SKIP first."""

    layers: int
    experts: int
    nbytes: tuple[int, ...]

    @property
    def top(self) -> Precision:
        """The highest precision."""
        return len(self.nbytes) - 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(precisions, layers, experts), of a record of every twin."""
        return len(self.nbytes), self.layers, self.experts


class Words(tuple[str, ...]):
    """What each precision is called, SKIP included: `words[precision]`. Two twins are "low" and "high", one is "high", more go by
    the names of their forms."""

    __slots__ = ()

    @classmethod
    def of(cls, forms: Sequence[str]) -> Words:
        """Of the twins' forms, fewest bytes first."""
        return cls(("skip", *{1: ("high",), 2: ("low", "high")}.get(len(forms), tuple(forms))))

    @property
    def top(self) -> Precision:
        """The highest precision."""
        return len(self) - 1

    @property
    def twins(self) -> range:
        """All precisions but SKIP, highest first: the order of tables."""
        return range(len(self) - 1, 0, -1)
