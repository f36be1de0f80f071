"""What says which experts a later layer will choose: the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from apex_engine.core.prefetch import Choice

EMBEDDING = -1  # the layer before the first


class Predictor(Protocol):
    """Contract: asked for a later layer's choice while one layer is at work, and shown what each layer was given. Changes
    nothing of the model. One thread at a time."""

    reads_embeddings: bool  # whether it can say of a token's embedding what the first layer will choose

    @property
    def ready(self) -> bool:
        """Whether it can be asked; it may have to see a pass first."""

    @property
    def unknown(self) -> Sequence[int]:
        """Layers that are not predicted, once `ready`."""

    def predict(self, now: int, later: int, x: Tensor) -> Choice | None:
        """Router input `[T, H]` of layer `now`, or embeddings for `EMBEDDING`, -> the choice of layer `later`; None where
        unknown.
        """

    def observe(self, layer: int, x: Tensor) -> None:
        """`layer` has got this router input `[1, H]`, and may have been predicted for this token."""

    def learn(self) -> None:
        """Follow what was observed: called when there is time, and at the end of a token."""
