"""Which experts a later layer will choose, from this layer's router input.

    gate     The residual stream changes little from layer to layer, so the later layer's router is asked with the input of
             this one (MoE-APEX, layer level).
    norm     The same. A router's input is normalised with the norm weight of its own layer: this layer's is divided out and the
             later one's multiplied in.

A router that chooses the largest of logits linear in its input, by a softmax, is asked here, in numpy: every operation of torch
lets other threads run Python, and while a token is decoded those are the loader's. Others (sigmoid, biased, grouped) are asked
themselves, with the corrected weights in the place of theirs, so that they choose as they do; the few whose logits are not linear
are asked with the corrected input. One layer is asked at a time: the walk (core/prefetch.py) stops at the first layer with a
missing expert, mostly the next one, so that asking p layers at once would cost more than it saves.

The first layer has none before it: it is asked with the token's embedding, normalised as a norm would.

Letters: T tokens, K chosen experts a token, H hidden, E experts.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apex_engine.core.prefetch import Choice
from apex_engine.predict.base import EMBEDDING
from apex_engine.predict.routers import Router, Routers


class GatePredictor:
    """A `Predictor` that asks the later layer's own router."""

    reads_embeddings = False

    def __init__(self, layers: list[tuple[nn.Module, nn.Module]], corrected: bool = False) -> None:
        """`layers`: for each MoE layer, the decoder layer and the MoE block in it. `corrected`: for the norms."""
        self.routers, self._corrected = Routers(layers), corrected
        self._scale: dict[tuple[int, int], Tensor] = {}
        self._questions: list[dict[int, Question]] = [{} for _ in layers]  # about each layer, by whose input asks

    @property
    def ready(self) -> bool:
        return self.routers.ready

    @property
    def unknown(self) -> list[int]:
        return [i for i, router in enumerate(self.routers.known) if router is None]

    def predict(self, now: int, later: int, x: Tensor) -> Choice | None:
        router = self.routers.known[later]
        if router is None:
            return None
        if now == EMBEDDING:
            x = x * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)
        if not router.linear:
            return _in_numpy(router.route(x * self.correction(now, later, x)))
        questions = self._questions[later]
        if now not in questions:
            questions[now] = Question(router, self.correction(now, later, x))
        return questions[now].ask(x)

    def observe(self, layer: int, x: Tensor) -> None:
        """Nothing is made of it."""

    def learn(self) -> None:
        """There is nothing to learn."""

    def asked_about(self, later: int) -> dict[int, Question]:
        """The questions that were asked about a layer, by the layer whose input asked."""
        return self._questions[later]

    def correction(self, now: int, later: int, x: Tensor) -> Tensor:
        """What the inputs `x` of `now` are multiplied by to be like those of `later`: `[H]`."""
        if (now, later) not in self._scale:
            ones = x.new_ones(x.shape[1])
            if not self._corrected:
                return ones
            mine, its = ones if now == EMBEDDING else self.routers.norms[now], self.routers.norms[later]
            self._scale[now, later] = ones if mine is None or its is None else its / mine
        return self._scale[now, later]


class Question:
    """A layer's router as it is asked with the input of another layer. `weight`: W, `[E, H]`."""

    def __init__(self, router: Router, correction: Tensor) -> None:
        self._router = router
        weight, bias = router.module.weight, getattr(router.module, "bias", None)
        self.weight: NDArray[np.float32] = (weight.detach().float() * correction.float()).cpu().numpy()
        self._bias = 0.0 if bias is None else bias.detach().float().cpu().numpy()
        self._module: Any = None  # a copy with these weights
        self.asked: NDArray[np.float32] | None = None  # x of the token's prediction, [H]

    def ask(self, x: Tensor) -> Choice | None:
        if len(x) == 1:
            self.asked = x[0].float().cpu().numpy().copy()
            if self._router.largest:
                # Not by BLAS, which would take threads for it.
                logits = np.einsum("eh,h->e", self.weight, self.asked) + self._bias
                chosen = np.argsort(-logits)[: self._router.largest]
                return Choice(np.exp(logits[chosen] - logits[chosen[0]])[None], chosen[None])
        if self._module is None:
            self._module = copy.copy(self._router.module)
            own = nn.Parameter(torch.from_numpy(self.weight).to(self._router.module.weight), requires_grad=False)
            self._module._parameters = {**self._module._parameters, "weight": own}
        return _in_numpy(self._router.route(x, self._module))

    def follow(self, logits: NDArray[np.float32], rate: float) -> None:
        """Move W towards `logits` `[E]` of the layer, without bias, for the token that was asked about."""
        x, self.asked = self.asked, None
        assert x is not None
        error = logits - np.einsum("eh,h->e", self.weight, x)
        self.weight += np.outer(error, x * (rate / max(float(x @ x), 1e-6)))
        self._module = None


def _in_numpy(choice: tuple[Tensor, Tensor] | None) -> Choice | None:
    return Choice(choice[0].float().cpu().numpy(), choice[1].cpu().numpy()) if choice else None
