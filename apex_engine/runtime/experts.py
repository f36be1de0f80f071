"""The module that stands where a model's routed experts stood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex_engine.errors import ApexError
from apex_engine.kernels.base import Activation
from apex_engine.runtime.engine import Engine


class ApexExperts(nn.Module):
    """Routed experts of one MoE layer, computed by the engine; same call as the module it replaces.

    Takes over the replaced module's children (activation, norm) under their own names and its gate function, and drops
    its weights.
    """

    def __init__(self, replaced: Any, layer: int) -> None:
        super().__init__()
        replaced._parameters.clear()
        for name, child in replaced.named_children():
            self.add_module(name, child)
        finish = replaced.post_expert_norm if getattr(replaced, "has_post_expert_norm", False) else None
        apply = replaced._apply_gate if replaced.has_gate else replaced.act_fn
        with torch.device("cpu"):  # a model under construction has "meta" as its default
            self._activation = Activation.of(apply, replaced.has_gate, finish)
        self.layer = layer
        self.engine: Engine | None = None  # set once the weights are loaded

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]`, router's choice and gate weights `[T, K]` -> `[T, H]`."""
        assert self.engine is not None, "the checkpoint is still being loaded"
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise ApexError(
                "an apex checkpoint cannot be trained: the experts have no gradients. Train the original model"
            )
        return self.engine.step(self.layer, hidden_states, top_k_index, top_k_weights, self._activation)
