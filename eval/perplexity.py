"""Perplexity of a model on token windows, and how far its distribution is from a reference's.

Letters: W windows, N tokens a window, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache


@dataclass(frozen=True)
class Score:
    """Means over all predicted tokens. `kl`: KL(reference || model) in nats; `agreement`: share of equal likeliest tokens."""

    loss: float  # nats a token
    kl: float
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.no_grad()
def window_logits(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Log-probabilities `[W, N - 1, V]` in float32 of the next tokens of `windows` `[W, N]`, each window in one pass."""
    rows = [model(input_ids=row[None, :-1], use_cache=False).logits[0].float() for row in windows.to(model.device)]
    return torch.stack(rows).log_softmax(-1)


@torch.no_grad()
def decoded_logits(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """The same, one token at a time as in decoding: what a lossy cache does depends on what is resident token by token."""
    # transformers 5.24 renamed the argument
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    result = []
    for row in windows.to(model.device):
        past = {name: DynamicCache(config=model.config)}
        steps = [model(input_ids=token.view(1, 1), **past, use_cache=True).logits[0, 0] for token in row[:-1]]
        result.append(torch.stack(steps).float())
    return torch.stack(result).log_softmax(-1)


def score(
    model: PreTrainedModel,
    windows: Tensor,
    reference: Tensor,
    logits: Callable[[PreTrainedModel, Tensor], Tensor] = window_logits,
) -> Score:
    """`reference`: log-probabilities `[W, N - 1, V]` of the reference model on the same `windows` `[W, N]`."""
    found = logits(model, windows)
    targets = windows[:, 1:, None].to(found.device)
    reference = reference.to(found.device)
    return Score(
        loss=-found.gather(-1, targets).mean().item(),
        kl=(reference.exp() * (reference - found)).sum(-1).mean().item(),
        agreement=(found.argmax(-1) == reference.argmax(-1)).float().mean().item(),
    )
