"""The seam between what a step wants and how it comes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from apex_engine.core.prefetch import Wish
from apex_engine.core.residency import Residency
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.memory.requests import Load

Ticket = Load
"""What a request returns: its completion (`over`), with the `slot` or the `error`."""


class Tier(Protocol):
    """Contract: brings twins to slots. A ticket pins the slot once for its holder, from `arrived` on (at once where the twin is
    resident), until `release`; who does not want it any more says so with `forget`.

    What comes before `arrived` below wants `lock` held, so that what a step decides from the
    residency is still true when it asks; the others take it.
    """

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Of all that it holds."""

    @property
    def residency(self) -> Residency:
        """What is where."""

    @property
    def rate(self) -> float:
        """Bytes a second while something is on its way, of late."""

    def request(self, expert: ExpertId, precision: Precision, now: int, share: int | None = None) -> Ticket:
        """A twin that layer `now` uses. One load a twin, however many ask. `share`: see `ExpertCache.reserve`."""

    def settle(self, tickets: Iterable[Ticket], busy: bool) -> None:
        """Find slots for them now, while all that the step has got is pinned. `busy`: the caller has other things to do before it
        waits for them."""

    def prefetch(self, wish: Wish, now: int) -> int:
        """A later layer will probably use this twin: keep it, or fetch it when nobody waits. Returns the bytes still to come."""

    def upgrade(self, expert: ExpertId, precision: Precision, now: int) -> None:
        """Fetch a better twin of one that serves meanwhile, when nobody waits for anything else."""

    def drop(self, layer: int) -> None:
        """Layer `layer` has got what it wants: give up what was fetched for it and nobody waits for, and keep nothing for it."""

    def drop_all(self) -> None:
        """A pass begins: give up every prefetch."""

    def end_streaming(self) -> None:
        """A prompt has gone through: free the slots that it used over and over."""

    def evict_all(self, precisions: Iterable[Precision]) -> None:
        """Free every slot of these twins that is resident and not pinned."""

    def arrived(self, tickets: list[Ticket]) -> list[Ticket]:
        """Waits for one of them at least, and takes those that are there out of the list.

        Raises the error of one that failed: its slot is free again, and the tier stays usable.
        """

    def forget(self, tickets: Iterable[Ticket]) -> None:
        """The caller does not wait for them any more."""

    def release(self, slots: list[tuple[Precision, int]]) -> None:
        """Give back a pin of each of these slots."""

    def busy_seconds(self) -> float:
        """Seconds so far in which something was on its way."""

    def recover(self) -> None:
        """A caller ended anywhere, as by Ctrl-C, and no other is under way: put the books in order."""

    def close(self) -> None:
        """Whoever waits gets an ApexError."""
