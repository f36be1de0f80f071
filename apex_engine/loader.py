"""Brings a twin from the store into a slot."""

from __future__ import annotations

import time

import torch

from apex_engine.cache import ExpertCache
from apex_engine.kernels.layout import ALIGN
from apex_engine.ledger import Ledger
from apex_engine.store import ExpertStore
from apex_engine.vocabulary import ExpertId, Precision


class Loader:
    """One load at a time, done when `fetch` returns.

    On a CPU the read goes straight into the slot; on another device through one buffer of host memory, pinned for CUDA.
    """

    def __init__(self, store: ExpertStore, cache: ExpertCache, ledger: Ledger, device: torch.device) -> None:
        self._store, self._cache, self.ledger = store, cache, ledger
        self._staging: torch.Tensor | None = None
        if device.type != "cpu":
            largest = max(store.layout(precision).stride for precision in cache.pools)
            raw = torch.empty(largest + ALIGN, dtype=torch.uint8, pin_memory=device.type == "cuda")
            start = -raw.data_ptr() % ALIGN
            self._staging = raw[start : start + largest]

    def fetch(self, expert: ExpertId, precision: Precision, now: int) -> int | None:
        """The slot of the twin, resident and pinned once for the caller; None where no slot can be had until pins are given up.

        Raises ApexError where the read fails; the slot is then free again and the engine stays usable.
        """
        start = time.perf_counter()
        slot = self._cache.reserve(expert, precision, now)
        if slot is None:
            return None
        try:
            target = self._cache.pools[precision].memory[slot]
            if self._staging is None:
                nbytes = self._store.read(expert, precision, target)
            else:
                staged = self._staging[: len(target)]
                nbytes = self._store.read(expert, precision, staged)
                target.copy_(staged)
        except BaseException:
            self._cache.abort(precision, slot)
            raise
        self._cache.commit(precision, slot)
        self.ledger.loads[precision] += 1
        self.ledger.bytes_read[precision] += nbytes
        self.ledger.load_seconds += time.perf_counter() - start
        return slot
