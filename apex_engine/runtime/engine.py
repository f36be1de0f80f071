"""The experts of one model: built whole for a device, told of passes, asked for layer steps, closed whole."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apex_engine.checkpoint.calibration import resolve
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import Config
from apex_engine.core import events
from apex_engine.core.admission import share
from apex_engine.core.events import Sink, Stream
from apex_engine.core.ledger import Ledger
from apex_engine.core.policies import POLICIES, Policy
from apex_engine.core.prefetch import PREFETCHERS, Prefetcher
from apex_engine.core.rules import Rules
from apex_engine.core.thresholds import Thresholds
from apex_engine.errors import ApexError
from apex_engine.kernels.base import Activation
from apex_engine.memory.link import Link
from apex_engine.memory.plan import Plan, make_plan
from apex_engine.memory.store import ExpertStore
from apex_engine.predict.base import EMBEDDING, Predictor
from apex_engine.runtime.build import Progress, load_every_lower_twin, make_device
from apex_engine.runtime.describe import describe_device, describe_plan
from apex_engine.runtime.device import Device
from apex_engine.runtime.step import Stepper


class _Work:
    """A call that changes state, with the engine's lock held. One that ended anywhere, as by Ctrl-C, is set right by the next."""

    def __init__(self, recover: Callable[[], object]) -> None:
        self._recover, self._settled = recover, True

    def __enter__(self) -> None:
        if not self._settled:
            self._recover()
        self._settled = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):  # whoever raised it has put things in order
            self._settled = True


class Engine:
    """`model.apex`. One lock serialises layer steps and everything else that changes state.

    Threads that run sequences at the same time share one set of records: a new sequence in one of them starts all afresh.
    """

    def __init__(
        self,
        manifest: Manifest,
        config: Config,
        plan: Plan,
        thresholds: Thresholds,
        store: ExpertStore,
        policy: Policy,
        prefetcher: Prefetcher,
    ) -> None:
        """Closes `store` when it is closed itself."""
        self.manifest, self.plan, self.geometry = manifest, plan, manifest.geometry
        self.ledger = Ledger(manifest.words)
        self.link = Link.parse(config.link) if config.link else None
        # What a layer step may change is told before what decides by it: the policy, the victims by its values.
        self.stream = Stream(policy, self.ledger, prefetcher)
        self._rules = Rules(config.mode, thresholds, len(manifest.twins), config.upgrade == "async")
        self._config, self._store, self._policy, self.prefetcher = config, store, policy, prefetcher
        self._predictor: Predictor | None = None
        self._device: Device | None = None  # made for the first token, or by `prepare`
        self._stepper: Stepper | None = None
        self._stop: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._work = _Work(self._recover)
        self._streams = False  # the pass under way is a prompt that goes through slots that it should not keep
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        config: Config,
        plan: Plan | None = None,
        store: ExpertStore | None = None,
        policy: Policy | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> Engine:
        """The engine of a checkpoint. What is not given is made as `config` says.

        Raises ApexError: unfinished checkpoint, budget too small.
        """
        manifest = Manifest.read(folder)
        thresholds = resolve(config, folder, manifest)
        return cls(
            manifest,
            config,
            plan or make_plan(config, manifest, calibrated=thresholds.calibrated),
            thresholds,
            store or ExpertStore(folder, manifest),
            policy or POLICIES[config.policy](manifest.geometry),
            prefetcher or PREFETCHERS[config.governor](len(manifest.layers), config.prefetch),
        )

    @property
    def config(self) -> Config:
        return self._config

    @property
    def thresholds(self) -> Thresholds:
        return self._rules.thresholds

    @property
    def predictor(self) -> Predictor | None:
        """Set once the model is there."""
        return self._predictor

    @predictor.setter
    def predictor(self, predictor: Predictor | None) -> None:
        self._predictor = predictor
        if self._stepper:
            self._stepper.predictor = predictor

    @property
    def device(self) -> Device | None:
        """Slots, tier and kernels, once there are some."""
        return self._device

    def stats(self) -> dict[str, Any]:
        """Options, plan, residency and the ledger since loading or the last `reset_stats`, as plain JSON."""
        if self._device:
            self._device.report()
        return {
            "config": asdict(self.config),
            "thresholds": self.thresholds.describe(),
            "plan": describe_plan(self.plan, self.manifest.words),
            **describe_device(self._device, self.manifest.words),
            "reads_bypass_page_cache": self._store.direct,
            "layers_not_predicted": list(self._predictor.unknown) if self._predictor and self._predictor.ready else [],
            **self.ledger.summary(),
        }

    def reset_stats(self, into: Ledger | None = None) -> None:
        """Count in a new ledger from now on, or go on with the one given. Resident experts and the policy's records stay."""
        with self._lock, self._device.tier.lock if self._device else nullcontext():
            self._count_in(into or Ledger(self.manifest.words))

    @contextmanager
    def watched(self, sink: Sink) -> Iterator[None]:
        """`sink` hears the engine's events inside."""
        self.stream.add(sink)
        try:
            yield
        finally:
            self.stream.remove(sink)

    def decide(self, mode: str, thresholds: Thresholds | None = None) -> None:
        """Serve by another mode, and by other thresholds if any are given: call it between passes. What is resident stays, and
        so do the kernels, which were chosen for the mode that was loaded. Raises ApexError where that was `exact`, which
        has no slots for LOW twins."""
        if mode != "exact" and not all(self.plan.slots.values()):
            raise ApexError(f"loaded in exact mode, the engine has no slots for LOW twins: load it as {mode}")
        with self._lock:
            self._config = replace(self._config, mode=mode)
            self._rules = replace(self._rules, mode=mode, thresholds=thresholds or self._rules.thresholds)
            if self._stepper:
                self._stepper.rules = self._rules

    def evict_all(self) -> None:
        """Forget every resident expert but the LOW twins that `low_share` "floor" holds; what is known of times and of the
        predictor stays. Call it between passes."""
        with self._lock, self._work:
            if self._device:
                precisions = self.manifest.precisions
                floor = self._config.low_share == "floor"
                with self._device.tier.lock:
                    self._device.tier.drop_all()
                    self._device.tier.evict_all(precisions[-1:] if floor else precisions)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books of the slots do not agree with each other. Changes nothing."""
        if self._device:
            with self._device.tier.lock:
                self._device.cache.check_integrity()
                if self._device.host:
                    self._device.host.check_integrity()

    def close(self) -> None:
        """Stop loading, close the expert files and free the slots. A model that is called afterwards raises ApexError."""
        with self._lock:
            self._closed = True
            self._stop()
            self._store.close()
            self._device = self._stepper = None

    def prepare(self, device: torch.device, dtype: torch.dtype, progress: Progress | None = None) -> None:
        """Make slots, host tier and threads now rather than at the first token. `progress(what, done, total)` is told of long
        work.
        """
        with self._lock, self._work:
            self._ready(device, dtype, progress)

    def begin_pass(self, phase: str, tokens: int, new_sequence: bool) -> None:
        """A forward pass over `tokens` tokens begins; `phase` is "prefill" or "decode"."""
        with self._lock, self._work:
            if self._predictor:
                self._predictor.learn()
            streaming = phase == "prefill" and self._config.admission == "stream"
            with self._device.tier.lock if self._device else nullcontext():
                self.stream.emit(events.PassBegins(phase, tokens, new_sequence))
                if self._device and self._stepper:
                    self._stepper.streaming = streaming
                    self._device.tier.drop_all()
                    if not streaming:
                        self._device.tier.end_streaming()
            self._streams = streaming

    def end_pass(self, phase: str, tokens: int, seconds: float) -> None:
        """It has ended."""
        with self._lock:
            if self._device:
                self._device.report()
            rate = self._device.tier.rate if self._device else 0.0
            self.stream.emit(events.PassEnds(phase, tokens, seconds, rate))

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
        with self._lock, self._work:
            stepper = self._ready(x.device, x.dtype)
            return stepper.step(layer, x, chosen, weights, activation, sizes or (len(x),))

    @torch.no_grad()
    def embedded(self, embeddings: Tensor) -> None:
        """A pass goes on with these embeddings `[B, T, H]`: of one token, they say what the first MoE layer may choose."""
        x = embeddings.reshape(-1, embeddings.shape[-1])
        with self._lock, self._work:
            if len(x) == 1 and self._stepper:
                self._stepper.look_ahead(EMBEDDING, x)

    def _recover(self) -> None:
        if self._device:
            self._device.tier.recover()

    def _ready(self, device: torch.device, dtype: torch.dtype, progress: Progress | None = None) -> Stepper:
        if self._closed:
            raise ApexError("the engine of this model was closed: load the checkpoint again")
        if self._device is None or self._stepper is None:
            self._build(device, dtype, progress)
        assert self._device is not None and self._stepper is not None
        if self._device.device != device:
            raise ApexError(
                f"the experts are on {self._device.device} but the model is on {device}: give the device to "
                "apex_engine.load"
            )
        return self._stepper

    def _build(self, device: torch.device, dtype: torch.dtype, progress: Progress | None) -> None:
        made = make_device(self, self._store, self._policy, device, dtype, progress)
        self._stop = weakref.finalize(self, made.tier.close)  # a dropped model ends its threads
        if self._config.low_share == "floor":
            load_every_lower_twin(made.tier, self.geometry)
            self._count_in(Ledger(self.manifest.words))  # it counts what tokens cost
        shares = {p: share(slots, len(self.manifest.layers)) for p, slots in self.plan.slots.items()}
        stepper = Stepper(made, self._rules, self.prefetcher, self.stream, shares)
        stepper.predictor, stepper.streaming = self._predictor, self._streams
        self._device, self._stepper = made, stepper

    def _count_in(self, ledger: Ledger) -> None:
        self.stream.remove(self.ledger)
        self.ledger = ledger
        self.stream.add(ledger)
