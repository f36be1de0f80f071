"""A simulated link in front of the fast memory, so that overlap and prefetch can be measured on any machine."""

from __future__ import annotations

import threading
import time

from apex_engine.config import parse_link


class Link:
    """Bytes go through one after the other, in real time, like over PCIe: each transfer takes its bytes over the rate, and
    arrives `latency` seconds later."""

    def __init__(self, bytes_per_second: float, latency: float = 0.0) -> None:
        self.bytes_per_second, self.latency = bytes_per_second, latency
        self.busy_seconds = 0.0
        self._free_at = 0.0
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str) -> Link:
        """From "2GB/s,20us" (the latency may be left out). Raises ApexError."""
        return cls(*parse_link(text))

    def transfer(self, nbytes: int) -> None:
        """Returns when the bytes have gone through."""
        seconds = nbytes / self.bytes_per_second
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + seconds
            arrival = self._free_at + self.latency
            self.busy_seconds += seconds
        # Late wake-ups do not add up: the next transfer starts where this one should have ended, if it was there by then.
        while (left := arrival - time.perf_counter()) > 0:
            time.sleep(left)
