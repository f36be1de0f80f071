"""How far a model's predictions are from a reference's, token by token: perplexity, KL divergence, equal likeliest tokens.

Letters: W windows, N tokens a window, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache


@dataclass(frozen=True)
class Comparison:
    """Means over the predicted tokens of each window, float64 `[W]`, in nats; and how many tokens were predicted in all.

    `kl` is KL(reference || model), `agreement` the share of tokens that both find likeliest. Standard errors are those of the
    mean over windows, since the tokens of a window are not independent of each other; None for a single window.
    """

    tokens: int
    reference_loss: Tensor
    loss: Tensor
    kl: Tensor
    agreement: Tensor

    @classmethod
    def joined(cls, parts: list[Comparison]) -> Comparison:
        names = ("reference_loss", "loss", "kl", "agreement")
        return cls(sum(p.tokens for p in parts), *(torch.cat([getattr(p, name) for p in parts]) for name in names))

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss.mean())

    @property
    def reference_perplexity(self) -> float:
        return math.exp(self.reference_loss.mean())

    @property
    def change(self) -> float:
        """Relative change of the perplexity."""
        return math.expm1((self.loss - self.reference_loss).mean())

    @property
    def change_stderr(self) -> float | None:
        return stderr(self.loss - self.reference_loss)

    def summary(self) -> dict[str, float | int | None]:
        return {
            "tokens": self.tokens,
            "reference_perplexity": self.reference_perplexity,
            "perplexity": self.perplexity,
            "change": self.change,
            "change_stderr": self.change_stderr,
            "kl": self.kl.mean().item(),
            "kl_stderr": stderr(self.kl),
            "agreement": self.agreement.mean().item(),
            "agreement_stderr": stderr(self.agreement),
        }


def stderr(values: Tensor) -> float | None:
    """Standard error of the mean of `values` `[W]`."""
    return None if len(values) < 2 else (values.std() / math.sqrt(len(values))).item()


@torch.no_grad()
def window_logits(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Log-probabilities `[W, N - 1, V]` in float32 of the next tokens of `windows` `[W, N]`, all in one pass."""
    return model(input_ids=windows[:, :-1].to(model.device), use_cache=False).logits.float().log_softmax(-1)


@torch.no_grad()
def decoded_logits(model: PreTrainedModel, windows: Tensor, prompt: int = 1) -> Tensor:
    """The same as in generation: the first `prompt` tokens in one pass, then one at a time. What a lossy cache does depends on
    what is resident token by token."""
    # transformers 5.24 renamed the argument
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    result = []
    for row in windows.to(model.device):
        past = {name: DynamicCache(config=model.config)}
        passes = [row[:prompt], *(row[i : i + 1] for i in range(prompt, len(row) - 1))]
        steps = [model(input_ids=tokens[None], **past, use_cache=True).logits[0] for tokens in passes]
        result.append(torch.cat(steps).float())
    return torch.stack(result).log_softmax(-1)


def judge(windows: Tensor, reference: Tensor, found: Tensor, last: int | None = None) -> Comparison:
    """Log-probabilities `[W, N - 1, V]` of both on `windows` `[W, N]`."""
    first = windows.shape[1] - 1 - (last or windows.shape[1] - 1)
    targets = windows[:, 1:, None].to(found.device)
    reference = reference.to(found.device)
    each = (
        -reference.gather(-1, targets)[..., 0],
        -found.gather(-1, targets)[..., 0],
        (reference.exp() * (reference - found)).sum(-1),
        (found.argmax(-1) == reference.argmax(-1)),
    )
    means = [values[:, first:].double().mean(1).cpu() for values in each]
    return Comparison(len(windows) * (windows.shape[1] - 1 - first), *means)
