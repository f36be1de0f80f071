"""Routers that learn, from every token, what a later layer makes of this one's input.

Begins as "norm" (gate.py), with a copy of the later layer's router whose weights W follow what the model does: a token's inputs
x of this layer and x' of the later one, the router's own weights G, and

    W += RATE (G x' - W x) x^T / (x^T x)        (normalised least mean squares)

Letters: H hidden, E experts.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from apex_engine.predict.gate import GatePredictor

RATE = 0.3


class LearnedPredictor(GatePredictor):
    """A `Predictor` whose questions learn where they are linear."""

    reads_embeddings = True

    def __init__(self, layers: list[tuple[nn.Module, nn.Module]]) -> None:
        super().__init__(layers, corrected=True)
        self._seen: list[tuple[int, Tensor]] = []  # layers and their inputs, to be learned from

    def observe(self, layer: int, x: Tensor) -> None:
        self._seen.append((layer, x))

    def learn(self) -> None:
        """Follow what was observed, where it was predicted."""
        seen, self._seen = self._seen, []
        for layer, x in seen:
            router = self.routers.known[layer]
            questions = [question for question in self._questions[layer].values() if question.asked is not None]
            if router is not None and questions:
                logits = linear(x, router.module.weight.to(x.dtype))[0].float().cpu().numpy()
                for question in questions:
                    question.follow(logits, RATE)
