"""One layer step: which twins, from where, and their weighted sum.

    router's choice -> scorer (what is it worth?) -> dispatch (which twin serves it?) -> cache, loader -> kernel -> output

Letters: T tokens, K chosen experts a token, H hidden.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apex_engine.cache import ExpertCache
from apex_engine.config import Config
from apex_engine.dispatch import Use, dispatch
from apex_engine.kernels.pick import pick
from apex_engine.kernels.reference import Activation, Kernel, Routed
from apex_engine.ledger import TWINS, Ledger
from apex_engine.loader import Loader
from apex_engine.plan import Plan, make_plan
from apex_engine.policies import POLICIES
from apex_engine.quantize.checkpoint import Manifest
from apex_engine.scorer import wanted
from apex_engine.store import ExpertStore
from apex_engine.vocabulary import ApexError, ExpertId, Precision


class Engine:
    """The experts of one model: `model.apex`. One lock serialises layer steps and everything else that changes state.

    Threads that run sequences at the same time share one set of records: a new sequence in one of them starts all afresh.

    Raises ApexError when made: unfinished checkpoint, budget too small.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self.config = config
        self.manifest = Manifest.read(folder)
        self.plan: Plan = make_plan(config, self.manifest)
        self.ledger = Ledger()
        self._store = ExpertStore(folder, self.manifest)
        stride = self.plan.stride
        self._policy = POLICIES[config.policy](
            len(self.manifest.layers), self.manifest.experts, stride[Precision.LOW] / stride[Precision.HIGH]
        )
        self._layouts = {precision: self._store.layout(precision) for precision in TWINS}
        self._cache: ExpertCache | None = None  # made on the device of the first token
        self._loader: Loader | None = None
        self._kernels: dict[Precision, Kernel] = {}
        self._closed = False
        self._lock = threading.Lock()

    def stats(self) -> dict[str, Any]:
        """Options, plan, residency and the ledger since loading or the last `reset_stats`, as plain JSON."""
        cache = self._cache
        pools = cache.pools if cache else {}
        resident = {p.word: len(pools[p].slot_of) if p in pools else 0 for p in TWINS}
        return {
            "config": asdict(self.config),
            "plan": {
                "budget_bytes": self.plan.budget,
                "slot_bytes": self.plan.slot_bytes,
                "slots": {p.word: n for p, n in self.plan.slots.items()},
                "blob_bytes": {p.word: n for p, n in self.plan.stride.items()},
                "experts": self.plan.experts,
                "dense_bytes": self.plan.dense_bytes,
            },
            "resident": {"bytes": cache.resident_bytes() if cache else 0, **resident},
            "kernels": {p.word: kernel.name for p, kernel in self._kernels.items()},
            "reads_bypass_page_cache": self._store.direct,
            **self.ledger.summary(),
        }

    def reset_stats(self) -> None:
        """Start the ledger afresh. Resident experts and the policy's records stay."""
        with self._lock:
            self.ledger = Ledger()
            if self._loader:
                self._loader.ledger = self.ledger

    def close(self) -> None:
        """Close the expert files and free the slots. A model that is called afterwards raises ApexError."""
        with self._lock:
            self._closed = True
            self._store.close()
            self._cache = self._loader = None

    def begin_pass(self, tokens: int, new_sequence: bool) -> None:
        """A forward pass over `tokens` tokens begins."""
        with self._lock:
            if new_sequence:
                self._policy.start_sequence()
                self.ledger.sequences += 1
            self._policy.start_pass(tokens)

    def end_pass(self, phase: str, tokens: int, seconds: float) -> None:
        """It has ended; `phase` is "prefill" or "decode"."""
        with self._lock:
            self.ledger.tokens[phase] += tokens
            self.ledger.seconds[phase] += seconds

    @torch.no_grad()
    def step(self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, activation: Activation) -> Tensor:
        """Routed experts of one layer: `x` `[T, H]`, router's `chosen` and `weights` `[T, K]` -> `[T, H]` in the dtype of `x`.

        The gate weights are applied and summed in float32, in the router's order whatever was resident. Raises ApexError where
        an expert cannot be read.
        """
        with self._lock:
            cache, loader = self._ready(x)
            gates = weights.float().cpu().numpy()
            ids = chosen.cpu().numpy()
            wishes = (
                np.full(ids.shape, Precision.HIGH, np.int8)
                if self.config.mode == "exact"
                else wanted(gates, self.config.t1, self.config.t2)
            )
            uses = dispatch(ids, wishes, self.config.mode, lambda e, p: cache.find(ExpertId(layer, e), p) is not None)
            self._count(layer, uses, wishes, gates)
            out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)  # [T, K, H]
            job = _Job(layer, x, weights.float().flatten(), activation, out)
            self._serve(job, [use for use in uses if use.precision is not Precision.SKIP], cache, loader)
            return out.sum(1).to(x.dtype)

    def _serve(self, job: _Job, uses: list[Use], cache: ExpertCache, loader: Loader) -> None:
        """Compute every use: first the resident ones, then the missing, in turns when they outnumber the slots."""
        pinned: list[tuple[Precision, int]] = []  # kept for the whole step if the slots allow
        ready: dict[Precision, list[tuple[Use, int]]] = {}
        missing = []
        try:
            for use in uses:
                slot = cache.find(ExpertId(job.layer, use.expert), use.precision)
                if slot is None:
                    missing.append(use)
                else:
                    cache.pin(use.precision, slot)
                    pinned.append((use.precision, slot))
                    ready.setdefault(use.precision, []).append((use, slot))
                    self.ledger.hits[use.precision] += 1
            for precision, served in ready.items():
                self._compute(job, precision, served)
            for use in missing:
                expert = ExpertId(job.layer, use.expert)
                slot = loader.fetch(expert, use.precision, job.layer)
                if slot is None:  # every slot holds an expert this step is through with
                    _release(pinned, cache)
                    slot = loader.fetch(expert, use.precision, job.layer)
                assert slot is not None, "no slot although nothing is pinned"
                pinned.append((use.precision, slot))
                self._compute(job, use.precision, [(use, slot)])
        finally:
            _release(pinned, cache)

    def _compute(self, job: _Job, precision: Precision, served: list[tuple[Use, int]]) -> None:
        start = time.perf_counter()
        choices = job.out.shape[1]
        uses = [use for use, _ in served]
        tokens = np.concatenate([use.tokens for use in uses]) if len(uses) > 1 else uses[0].tokens
        rows = tokens * choices + (np.concatenate([use.choices for use in uses]) if len(uses) > 1 else uses[0].choices)
        first = np.array([0, *itertools.accumulate(len(use.tokens) for use in uses)])
        slots = [slot for _, slot in served]
        self._kernels[precision](
            job.x, slots, Routed(first, tokens, rows), job.gates, job.activation, job.out.view(-1, job.out.shape[2])
        )
        self.ledger.compute_seconds += time.perf_counter() - start

    def _count(self, layer: int, uses: list[Use], wishes: np.ndarray, gates: np.ndarray) -> None:
        ledger = self.ledger
        magnitude = np.abs(gates)
        for precision, n in zip(Precision, np.bincount(wishes.ravel(), minlength=len(Precision)), strict=True):
            ledger.asked[precision] += int(n)
        for use in uses:
            count = len(use.tokens)
            ledger.calls[use.precision] += count
            ledger.mass[use.precision] += float(magnitude[use.tokens, use.choices].sum())
            if use.precision is not Precision.SKIP:
                self._policy.use(layer, use.expert, use.precision, count)

    def _ready(self, x: Tensor) -> tuple[ExpertCache, Loader]:
        if self._closed:
            raise ApexError("the engine of this model was closed: load the checkpoint again")
        if self._cache is None or self._loader is None:
            self._cache = ExpertCache(self._layouts, self.plan.slots, self._policy, x.device)
            bit_equal = self.config.mode != "adaptive" and x.dtype != torch.float32
            self._kernels = {
                precision: pick(self.config.kernels, pool.layout, pool.memory, bit_equal)
                for precision, pool in self._cache.pools.items()
            }
            self._loader = Loader(self._store, self._cache, self.ledger, x.device)
        held = next(iter(self._cache.pools.values())).memory.device
        if held != x.device:
            raise ApexError(
                f"the experts are on {held} but the model is on {x.device}: give the device to apex_engine.load"
            )
        return self._cache, self._loader


class _Job(NamedTuple):
    """One layer step: `x` `[T, H]`, `gates` float32 `[T K]`, `out` float32 `[T, K, H]`."""

    layer: int
    x: Tensor
    gates: Tensor
    activation: Activation
    out: Tensor


def _release(pinned: list[tuple[Precision, int]], cache: ExpertCache) -> None:
    while pinned:
        cache.unpin(*pinned.pop())
