"""Requests side by side, each with the bits it has alone.

Batching as usual puts requests into one tensor: then the sums in every product depend on the batch, a gate score near a threshold
falls on the other side of it, and an answer changes. Here every request goes through the model by itself, and they meet only
where it pays, at the experts: a layer step of all requests loads an expert once, and computes each request as if alone.

Each request has a thread, of which one runs at a time. A thread that comes to the experts waits there for all others; the last
one to come does the step for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from apex_engine.kernels.base import Activation
from apex_engine.runtime.engine import Engine
from apex_engine.runtime.experts import ApexExperts

T = TypeVar("T")


@dataclass
class _Call:
    layer: int
    x: Tensor
    chosen: Tensor
    weights: Tensor
    activation: Activation
    out: Tensor | None = None


class Together:
    """Stands in for the engine in the model's experts modules while `run` lasts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._experts = [module for module in model.modules() if isinstance(module, ApexExperts)]
        self._engine: Engine = model.apex
        self._turn = threading.Condition()
        self._waiting: list[_Call] = []
        self._running = 0
        self._error: BaseException | None = None

    def run(self, work: Sequence[Callable[[], T]]) -> list[T]:
        """Call all of `work`, each of which runs the model, for the same layers in the same order. Raises what one of them
        raises."""
        results: dict[int, T] = {}
        threads = [threading.Thread(target=self._one, args=(i, call, results)) for i, call in enumerate(work)]
        self._running, self._error = len(threads), None
        for module in self._experts:
            module.engine = self  # type: ignore[assignment]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: the threads end at their next layer
            with self._turn:
                self._fail(error)
            for thread in threads:
                thread.join()
            raise
        finally:
            for module in self._experts:
                module.engine = self._engine
        if self._error:
            raise self._error
        return [results[i] for i in range(len(threads))]

    def step(self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor, activation: Activation) -> Tensor:
        """`Engine.step` of one request, called with the turn held."""
        call = _Call(layer, x, chosen, weights, activation)
        self._waiting.append(call)
        self._serve()
        self._turn.wait_for(lambda: call.out is not None or self._error)
        if call.out is None:
            raise RuntimeError("another request failed")
        return call.out

    def _one(self, i: int, call: Callable[[], T], results: dict[int, T]) -> None:
        with self._turn:
            try:
                if not self._error:
                    with torch.no_grad():
                        results[i] = call()
            except BaseException as error:
                self._fail(error)
            finally:
                self._running -= 1
                self._serve()

    def _serve(self) -> None:
        """If all that run are waiting, one step for all."""
        if not self._waiting or len(self._waiting) < self._running or self._error:
            return
        calls, self._waiting = self._waiting, []
        try:
            assert len({call.layer for call in calls}) == 1, "requests at different layers"
            x, chosen, weights = (
                torch.cat([getattr(call, name) for call in calls]) for name in ("x", "chosen", "weights")
            )
            sizes = [len(call.x) for call in calls]
            out = self._engine.step(calls[0].layer, x, chosen, weights, calls[0].activation, sizes)
            for call, part in zip(calls, out.split(sizes), strict=True):
                call.out = part
        except BaseException as error:
            self._fail(error)
        self._turn.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._waiting.clear()
        self._turn.notify_all()
