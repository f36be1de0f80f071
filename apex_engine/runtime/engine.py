"""One layer step: which twins, from where, and their weighted sum.

    router's choice -> scorer (what is it worth?) -> dispatch (which twin serves it?) -> cache, loader -> kernel -> output

Letters: T tokens, K chosen experts a token, H hidden.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apex_engine.checkpoint.calibration import resolve
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import Config
from apex_engine.core.dispatch import PRECISIONS, Use, dispatch
from apex_engine.core.ledger import TWINS, Ledger
from apex_engine.core.policies import POLICIES
from apex_engine.core.scorer import wanted
from apex_engine.core.thresholds import Thresholds
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.errors import ApexError
from apex_engine.kernels.base import Activation, Kernel, Routed, Views
from apex_engine.kernels.registry import pick
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.host import host_tier
from apex_engine.memory.link import Link
from apex_engine.memory.loader import LEAST_EARLY, Load, Loader
from apex_engine.memory.plan import Plan, make_plan
from apex_engine.memory.store import ExpertStore
from apex_engine.predict.learned import EMBEDDING, Predictor

Observer = Callable[["Job", Use, Views], None]  # a layer step, one twin and the pairs it serves, its fields
LEAST_TRUST = 0.5  # a layer whose experts are predicted worse than this of late is not prefetched
COUNT, ZEROS = np.arange(1025), np.zeros(1024, np.int64)  # of the pairs of one token


class Engine:
    """The experts of one model: `model.apex`. One lock serialises layer steps and everything else that changes state.

    Threads that run sequences at the same time share one set of records: a new sequence in one of them starts all afresh.

    Raises ApexError when made: unfinished checkpoint, budget too small.
    """

    def __init__(self, folder: Path, config: Config, dense_bytes: int | None = None, kv_bytes: int | None = 0) -> None:
        """`dense_bytes`, `kv_bytes`: of the model as it is computed, for `config.device_memory`."""
        self.config = config
        self.manifest = Manifest.read(folder)
        self.thresholds = resolve(config, folder, self.manifest)
        self.plan: Plan = make_plan(config, self.manifest, dense_bytes, kv_bytes, self.thresholds.calibrated)
        self.ledger = Ledger()
        self.predictor: Predictor | None = None  # set once the model is there
        self.observe: Observer | None = None  # shown all that is computed; for calibration
        self._store = ExpertStore(folder, self.manifest)
        stride, layers = self.plan.stride, len(self.manifest.layers)
        cost_ratio = stride[Precision.LOW] / stride[Precision.HIGH]
        self._policy = POLICIES[config.policy](layers, self.manifest.experts, cost_ratio)
        self._layouts = {precision: self._store.layout(precision) for precision in TWINS}
        # Slots of a layer while a prompt streams.
        self._share = {p: -(-slots // layers) for p, slots in self.plan.slots.items()}
        self._degrade = config.upgrade == "async"
        self.link = Link.parse(config.link) if config.link else None
        self._cache: ExpertCache | None = None  # made on the device of the first token
        self._loader: Loader | None = None
        self._stop: Callable[[], object] = lambda: None
        self._kernels: dict[Precision, Kernel] = {}
        self._streaming = False
        self._pace, self._trial = _Pace(), _Trial()
        self._expected: dict[int, list[int]] = {}  # layer -> predicted choice of the token being decoded
        self._trust = np.ones(layers)  # share of a layer's choice that was predicted, of late
        self._closed = False
        self._lock = threading.Lock()

    def stats(self) -> dict[str, Any]:
        """Options, plan, residency and the ledger since loading or the last `reset_stats`, as plain JSON."""
        cache = self._cache
        pools = cache.pools if cache else {}
        resident = {p.word: len(pools[p].slot_of) if p in pools else 0 for p in TWINS}
        return {
            "config": asdict(self.config),
            "thresholds": asdict(self.thresholds),
            "plan": {
                "budget_bytes": self.plan.budget,
                "slot_bytes": self.plan.slot_bytes,
                "slots": {p.word: n for p, n in self.plan.slots.items()},
                "blob_bytes": {p.word: n for p, n in self.plan.stride.items()},
                "experts": self.plan.experts,
                "dense_bytes": self.plan.dense_bytes,
                "host_slots": {p.word: n for p, n in self.plan.host_slots.items()},
            },
            "resident": {"bytes": cache.resident_bytes() if cache else 0, **resident},
            "kernels": {p.word: kernel.name for p, kernel in self._kernels.items()},
            "reads_bypass_page_cache": self._store.direct,
            "host_tier_is_pinned": self._loader.host_is_pinned() if self._loader else None,
            "layers_not_predicted": self.predictor.unknown if self.predictor and self.predictor.ready else [],
            **self.ledger.summary(),
        }

    def reset_stats(self, into: Ledger | None = None) -> None:
        """Count in a new ledger from now on, or go on with the one given. Resident experts and the policy's records stay."""
        with self._lock:
            self.ledger = into or Ledger()
            if self._loader:
                self._loader.ledger = self.ledger

    def decide(self, mode: str, thresholds: Thresholds | None = None) -> None:
        """Serve by another mode, and by other thresholds if any are given: call it between passes. What is resident stays, and
        so do the kernels, which were chosen for the mode that was loaded. Raises ApexError where that was `exact`, which
        has no slots for LOW twins."""
        if mode != "exact" and not self.plan.slots[Precision.LOW]:
            raise ApexError(f"loaded in exact mode, the engine has no slots for LOW twins: load it as {mode}")
        with self._lock:
            self.config = replace(self.config, mode=mode)
            self.thresholds = thresholds or self.thresholds

    def evict_all(self) -> None:
        """Forget every resident expert but the LOW twins that `low_share` "floor" holds; what is known of times and of the
        predictor stays. Call it between passes."""
        with self._lock:
            if self._cache and self._loader:
                with self._loader.lock:
                    self._loader.drop_all()
                    self._cache.evict_all(TWINS[:1] if self.config.low_share == "floor" else TWINS)

    def close(self) -> None:
        """Stop loading, close the expert files and free the slots. A model that is called afterwards raises ApexError."""
        with self._lock:
            self._closed = True
            self._stop()
            self._store.close()
            self._cache = self._loader = None
            self._kernels = {}

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make slots, host tier and threads now rather than at the first token."""
        with self._lock:
            self._ready(device, dtype)

    def begin_pass(self, phase: str, tokens: int, new_sequence: bool) -> None:
        """A forward pass over `tokens` tokens begins; `phase` is "prefill" or "decode"."""
        with self._lock, self._loader.lock if self._loader else nullcontext():
            if new_sequence:
                self._policy.start_sequence()
                self.ledger.sequences += 1
            self._policy.start_pass(tokens)
            self._streaming = phase == "prefill" and self.config.admission == "stream"
            self._expected.clear()
            if self.predictor:
                self.predictor.learn()
            self._pace.begin()
            self._trial.on = True
            if phase == "decode":
                self._trial.begin(self.ledger.demanded_bytes)
            if self._cache and self._loader:
                self._loader.drop_all()
                if not self._streaming:
                    self._cache.end_streaming()

    def end_pass(self, phase: str, tokens: int, seconds: float) -> None:
        """It has ended."""
        with self._lock:
            self.ledger.tokens[phase] += tokens
            self.ledger.seconds[phase] += seconds
            if phase == "decode":
                self._trial.end(seconds, self.ledger.demanded_bytes, self._loader.rate if self._loader else 0.0)

    @torch.no_grad()
    def step(
        self,
        layer: int,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Routed experts of one layer: `x` `[T, H]`, router's `chosen` and `weights` `[T, K]` -> `[T, H]` in the dtype of `x`.

        With `sizes`, which sum to T, the tokens are those of so many requests one after the other: loads are shared, and each
        request is computed in the products it would be computed in alone, so that its bits do not depend on the others.

        The gate weights are applied and summed in float32, in the router's order whatever was resident. Raises ApexError where
        an expert cannot be read.
        """
        with self._lock:
            cache, loader = self._ready(x.device, x.dtype)
            self._pace.step()
            weights = weights.float()
            gates, ids = weights.cpu().numpy(), chosen.cpu().numpy()
            wishes = self._wishes(layer, gates)
            out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)  # [T, K, H]
            job = Job(layer, x, weights.flatten(), activation, out, tuple(sizes or (len(x),)))
            ready: dict[Precision, list[tuple[Use, int]]] = {}
            coming: dict[Load, Use] = {}
            with loader.lock:
                uses = self._dispatch(layer, ids, wishes, cache)
                self._count(layer, uses, wishes, gates)
                for use in sorted(uses, key=_most_tokens) if len(ids) > 1 else uses:
                    if use.precision is not Precision.SKIP:
                        share = self._share[use.precision] if self._streaming else None
                        held = loader.acquire(ExpertId(layer, use.expert), use.precision, layer, share)
                        if isinstance(held, Load):
                            coming[held] = use
                        else:
                            ready.setdefault(use.precision, []).append((use, held))
                            self.ledger.hits[use.precision] += 1
                loader.settle(coming)
                loader.drop(layer)
                if self._degrade:
                    self._upgrade(layer, ids, wishes, loader)
            try:
                if len(ids) == 1:
                    self._judge(layer, x, ids, gates)
                self._serve(job, ready, coming, cache, loader)
            finally:
                if coming or ready:  # it failed
                    loader.forget(coming)
                    loader.release([(p, slot) for p, served in ready.items() for _, slot in served])
            if len(job.sizes) == 1:
                return out.sum(1).to(x.dtype)
            return torch.cat([part.sum(1) for part in out.split(job.sizes)]).to(x.dtype)

    def _serve(
        self,
        job: Job,
        ready: dict[Precision, list[tuple[Use, int]]],
        coming: dict[Load, Use],
        cache: ExpertCache,
        loader: Loader,
    ) -> None:
        """Compute what is resident, then what arrives, as it arrives. Empties `ready` and `coming` on its way."""
        # Demands go first: where there are some, there is time to look ahead, and to learn, while they arrive.
        waits = bool(coming)
        if not waits:
            self._look_ahead(job.layer, job.x, cache, loader)
        while ready or coming:
            for precision in list(ready):
                self._compute(job, precision, ready[precision])
                # Given back at once: with few slots, the next load needs this one.
                loader.release([(precision, slot) for _, slot in ready.pop(precision)])
            if coming:
                if waits:
                    waits = False
                    self._look_ahead(job.layer, job.x, cache, loader)
                    if self.predictor:
                        self.predictor.learn()
                before, start = loader.busy_seconds(), time.perf_counter()
                waiting = list(coming)
                try:
                    arrived = loader.arrived(waiting)
                finally:
                    stall = time.perf_counter() - start
                    self._pace.stall += stall
                    self.ledger.stall_seconds += stall
                    self.ledger.stall_busy_seconds += min(stall, loader.busy_seconds() - before)
                    taken = [(load, coming.pop(load)) for load in list(coming) if load not in waiting]
                for load, use in taken:
                    assert load.slot is not None and load in arrived
                    ready.setdefault(load.precision, []).append((use, load.slot))

    @torch.no_grad()
    def embedded(self, embeddings: Tensor) -> None:
        """A pass goes on with these embeddings `[B, T, H]`: of one token, they say what the first MoE layer may choose."""
        x = embeddings.reshape(-1, embeddings.shape[-1])
        with self._lock:
            if len(x) == 1 and self._cache and self._loader:
                self._look_ahead(EMBEDDING, x, self._cache, self._loader)

    def _look_ahead(self, layer: int, x: Tensor, cache: ExpertCache, loader: Loader) -> None:
        """Predict the coming layers, as far as nothing is missing there; keep what they will use, and fetch what is missing: no
        more than the link brings while nobody waits for it."""
        predictor = self.predictor
        if not predictor or not predictor.ready or self._all_resident() or self._streaming or not self._trial.on:
            return
        budget = loader.rate * self._pace.free
        if budget < LEAST_EARLY:  # on a slow link, most of a block would be in the way of the next layer's own demands
            return
        for later in range(layer + 1, min(layer + 1 + self.config.prefetch, len(self.manifest.layers))):
            found = predictor.predict(layer, later, x)
            if found is None:
                break
            weights, chosen = found
            if len(x) == 1 and later == layer + 1:
                self._expected[later] = chosen[0][np.argsort(-np.abs(weights[0]), kind="stable")].tolist()
            if self._trust[later] < LEAST_TRUST:
                break
            if self._fetch_ahead(layer, later, chosen, weights, budget, cache, loader):
                break

    def _all_resident(self) -> bool:
        """Whether nothing will ever be missing, once it has come."""
        return self.config.mode == "exact" and self.plan.slots[Precision.HIGH] == self.plan.experts

    def _fetch_ahead(
        self,
        layer: int,
        later: int,
        chosen: np.ndarray,
        weights: np.ndarray,
        budget: float,
        cache: ExpertCache,
        loader: Loader,
    ) -> int:
        """Bytes that `later` is missing."""
        missing = 0
        wishes = self._wishes(later, weights)
        with loader.lock:
            uses = self._dispatch(later, chosen, wishes, cache)
            mass = np.abs(weights)
            for use in sorted(uses, key=lambda use: -mass[use.tokens, use.choices].sum()):
                if use.precision is Precision.SKIP:
                    continue
                if missing < budget:
                    missing += loader.expect(ExpertId(later, use.expert), use.precision, layer, int(budget))
        return missing

    def _upgrade(self, layer: int, ids: np.ndarray, wishes: np.ndarray, loader: Loader) -> None:
        """Fetch the HIGH twins that were wanted and not waited for, when nobody waits for anything else."""
        for expert in np.unique(ids[wishes == Precision.HIGH]).tolist():
            loader.expect(ExpertId(layer, expert), Precision.HIGH, layer)

    def _judge(self, layer: int, x: Tensor, ids: np.ndarray, gates: np.ndarray) -> None:
        """What was predicted for this layer and token, if anything, by what it chose."""
        if self.predictor:
            self.predictor.watch(layer, x)
        expected = self._expected.pop(layer, None)
        if expected is None:
            return
        chosen = set(ids[0].tolist())
        right = len(chosen.intersection(expected))
        self.ledger.predicted += 1
        self.ledger.predicted_top1 += expected[0] == int(ids[0, np.abs(gates[0]).argmax()])
        self.ledger.predicted_all += right == len(chosen)
        self._trust[layer] += 0.1 * (right / len(chosen) - self._trust[layer])

    def _wishes(self, layer: int, gates: np.ndarray) -> np.ndarray:
        if self.config.mode == "exact":
            return np.full(gates.shape, int(Precision.HIGH), np.int8)
        return wanted(gates, self.thresholds.t1[layer], self.thresholds.t2[layer])

    def _dispatch(self, layer: int, chosen: np.ndarray, wishes: np.ndarray, cache: ExpertCache) -> list[Use]:
        def resident(expert: int, precision: Precision) -> bool:
            return cache.find(ExpertId(layer, expert), precision) is not None

        return dispatch(chosen, wishes, self.config.mode, resident, self._degrade)

    def _compute(self, job: Job, precision: Precision, served: list[tuple[Use, int]]) -> None:
        start = time.perf_counter()
        for one, some in _by_request(job, served) if len(job.sizes) > 1 else ((job, served),):
            self._compute_request(one, precision, some)
        self.ledger.compute_seconds += time.perf_counter() - start

    def _compute_request(self, job: Job, precision: Precision, served: list[tuple[Use, int]]) -> None:
        choices = job.out.shape[1]
        slots = [slot for _, slot in served]
        if len(job.out) == 1:
            rows = np.concatenate([use.choices for use, _ in served])
            routed = Routed(COUNT[: len(rows) + 1], ZEROS[: len(rows)], rows)
        else:
            tokens = np.concatenate([use.tokens for use, _ in served])
            rows = tokens * choices + np.concatenate([use.choices for use, _ in served])
            first = np.array([0, *itertools.accumulate(len(use.tokens) for use, _ in served)])
            routed = Routed(first, tokens, rows)
        out = job.out.view(-1, job.out.shape[2])
        self._kernels[precision](job.x, slots, routed, job.gates, job.activation, out)
        if self.observe and self._cache:
            pool = self._cache.pools[precision]
            for use, slot in served:
                self.observe(job, use, pool.layout.views(pool.memory[slot]))

    def _count(self, layer: int, uses: list[Use], wishes: np.ndarray, gates: np.ndarray) -> None:
        ledger = self.ledger
        if len(gates) == 1:
            weights, wished = np.abs(gates[0]).tolist(), wishes[0].tolist()
            for i, use in enumerate(uses):  # in the order of the choices
                precision = use.precision
                ledger.asked[PRECISIONS[wished[i]]] += 1
                ledger.calls[precision] += 1
                ledger.mass[precision] += weights[i]
                ledger.degraded += wished[i] > precision
                if precision is not Precision.SKIP:
                    self._policy.use(layer, use.expert, precision, 1)
            return
        magnitude = np.abs(gates)
        for precision, n in zip(Precision, np.bincount(wishes.ravel(), minlength=len(Precision)), strict=True):
            ledger.asked[precision] += int(n)
        for use in uses:
            count = len(use.tokens)
            ledger.calls[use.precision] += count
            ledger.mass[use.precision] += float(magnitude[use.tokens, use.choices].sum())
            ledger.degraded += int((wishes[use.tokens, use.choices] > use.precision).sum())
            if use.precision is not Precision.SKIP:
                self._policy.use(layer, use.expert, use.precision, count)

    def _ready(self, device: torch.device, dtype: torch.dtype) -> tuple[ExpertCache, Loader]:
        if self._closed:
            raise ApexError("the engine of this model was closed: load the checkpoint again")
        if self._cache is None or self._loader is None:
            self._cache = ExpertCache(self._layouts, self.plan.slots, self._policy, device)
            bit_equal = self.config.mode != "adaptive" and dtype != torch.float32
            self._kernels = {
                precision: pick(self.config.kernels, pool.layout, pool.memory, bit_equal)
                for precision, pool in self._cache.pools.items()
            }
            layers, experts = len(self.manifest.layers), self.manifest.experts
            host = host_tier(self._layouts, self.plan, self._store, layers, experts, device)
            self._loader = Loader(self._store, self._cache, self.ledger, device, self.link, host)
            self._stop = weakref.finalize(self, self._loader.close)  # a dropped model ends its threads
            if self.config.low_share == "floor" and Precision.LOW in self._cache.pools:
                self._load_every_low_twin(self._loader)
        held = next(iter(self._cache.pools.values())).memory.device
        if held != device:
            raise ApexError(
                f"the experts are on {held} but the model is on {device}: give the device to apex_engine.load"
            )
        return self._cache, self._loader

    def _load_every_low_twin(self, loader: Loader) -> None:
        for layer in range(len(self.manifest.layers)):
            with loader.lock:
                wanted = [
                    loader.acquire(ExpertId(layer, e), Precision.LOW, layer) for e in range(self.manifest.experts)
                ]
            coming = [load for load in wanted if isinstance(load, Load)]
            while coming:
                for load in loader.arrived(coming):
                    assert load.slot is not None
                    loader.release([(Precision.LOW, load.slot)])
        self.ledger = loader.ledger = Ledger()  # it counts what tokens cost


class _Pace:
    """How much time of a layer, of late, nobody waits: what the link could bring meanwhile is the budget of prefetches."""

    def __init__(self) -> None:
        self.free = 0.0  # seconds
        self.stall = 0.0  # since the last step began
        self._last: float | None = None

    def begin(self) -> None:
        """A pass begins: what happens between two passes is no layer's time."""
        self._last = None

    def step(self) -> None:
        """A layer step begins."""
        now = time.perf_counter()
        if self._last is not None:
            self.free += 0.1 * (now - self._last - self.stall - self.free)
        self._last, self.stall = now, 0.0


class _Trial:
    """Whether looking ahead pays on this machine and link: every so often a token is decoded the other way than those before it.

    Tokens differ by the bytes they were missing more than by anything else, so the link's time for those is taken off first,
    whether a prefetch had brought them or not: for the bundled model behind a link this leaves a deviation of 2 ms of 9.
    """

    FIRST, EVERY, MOST = 16, 16, 16  # tokens that take turns; then tokens from trial to trial; trials to decide by
    LEAST = 0.02  # of a token's time: what must be gained, for twins that were put out in vain cost something later

    def __init__(self) -> None:
        self.on = True
        self._gains: deque[float] = deque(maxlen=self.MOST)  # what looking ahead saved, as a share of a token's time
        self._others: list[float] = []  # seconds of the tokens since the last trial
        self._tokens = self._bytes = 0

    def begin(self, demanded: int) -> None:
        """A token is going to be decoded; `demanded` bytes so far."""
        self._tokens += 1
        self._bytes = demanded
        some = len(self._gains) // 8
        gains = sorted(self._gains)[some : len(self._gains) - some]  # without the lowest and the highest eighth
        self.on = (not gains or statistics.fmean(gains) >= self.LEAST) != self._is_trial()

    def end(self, seconds: float, demanded: int, rate: float) -> None:
        """It took `seconds`, and the link brings `rate` bytes a second."""
        whole = seconds
        seconds -= (demanded - self._bytes) / max(rate, 1.0)
        if self._is_trial() and self._others:
            gain = (seconds - statistics.fmean(self._others)) / whole
            self._gains.append(-gain if self.on else gain)
            self._others.clear()
        else:
            self._others.append(seconds)

    def _is_trial(self) -> bool:
        return self._tokens % (2 if self._tokens <= self.FIRST else self.EVERY) == 0


class Job(NamedTuple):
    """One layer step: `x` `[T, H]`, `gates` float32 `[T K]`, `out` float32 `[T, K, H]`; `sizes` of its requests in tokens."""

    layer: int
    x: Tensor
    gates: Tensor
    activation: Activation
    out: Tensor
    sizes: tuple[int, ...]


def _by_request(job: Job, served: list[tuple[Use, int]]) -> Iterator[tuple[Job, list[tuple[Use, int]]]]:
    """Each request of the step that some of `served` serve, as a step of its own, and what serves it."""
    choices, first = job.out.shape[1], 0
    for size in job.sizes:
        stop = first + size
        some = []
        for use, slot in served:
            inside = (use.tokens >= first) & (use.tokens < stop)
            if inside.any():
                own = use._replace(tokens=use.tokens[inside] - first, choices=use.choices[inside])
                some.append((own, slot))
        if some:
            gates = job.gates[first * choices : stop * choices]
            yield Job(job.layer, job.x[first:stop], gates, job.activation, job.out[first:stop], (size,)), some
        first = stop


def _most_tokens(use: Use) -> int:
    return -len(use.tokens)
