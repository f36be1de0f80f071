"""What decisions see of the memory: which twin is where, to be read and not to be changed."""

from __future__ import annotations

from typing import Protocol

from apex_engine.core.vocabulary import ExpertId, Precision


class Residency(Protocol):
    """Contract: no call changes anything; an answer holds while the tier's lock is held."""

    def best(self, expert: ExpertId) -> Precision:
        """The highest precision at which the expert is resident; SKIP where it is not."""

    def find(self, expert: ExpertId, precision: Precision) -> int | None:
        """The slot of a resident twin, or None."""
