"""What the link brings, and how long it was busy. Times are arguments."""

from __future__ import annotations

FADE = 0.98  # of earlier blocks, for each new one


class Meter:
    """Of blocks that come one after the other or several at a time. The tier's lock is held."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes a second while something is on its way, of late
        self._busy = 0.0  # seconds so far in which something was on its way
        self._since: float | None = None  # when something was on its way last, not counted yet
        self._bytes = self._seconds = 0.0

    def begin(self, now: float) -> None:
        """A block sets out, and no other is on its way."""
        self._since = now

    def end(self, nbytes: int, now: float, others: bool) -> float:
        """A block has come; `others`: some are still on their way. Returns the busy seconds since the last call."""
        seconds = now - self._since if self._since is not None else 0.0
        self._since = now if others else None
        self._busy += seconds
        self._bytes = FADE * self._bytes + nbytes
        self._seconds = FADE * self._seconds + seconds
        self.rate = self._bytes / max(self._seconds, 1e-9)
        return seconds

    def busy(self, now: float) -> float:
        """Seconds so far in which something was on its way."""
        return self._busy + (now - self._since if self._since is not None else 0.0)
