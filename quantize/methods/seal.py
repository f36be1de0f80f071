"""The last step of every method: scale and zero as they are stored, and the codes that go with them.

Letters: G groups, g weights a group.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seal(
    groups: Tensor, scale: Tensor, zero: Tensor, bits: int, shape: torch.Size, importance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round scale and zero to the stored float16 and take the codes that fit the rounded ones.

    A group whose values lie close together far from zero has no usable float16 zero (w/s overflows or is too coarse): it is
    stored as its mean instead, wherever that is the smaller error.
    """
    scale16, zero16 = scale.half(), zero.half()
    usable = torch.isfinite(scale16) & torch.isfinite(zero16) & (scale16 > 0)
    s, z = torch.where(usable, scale16, 1.0).float(), torch.where(usable, zero16, 0.0).float()
    codes = (groups / s + z).round_().clamp_(0, 2**bits - 1)
    error = mean(((codes - z) * s - groups).square_(), importance)

    centre = mean(groups, importance)
    constant_error = mean((centre.half().float() - groups).square_(), importance)
    constant = ~usable | (constant_error < error)
    codes = torch.where(constant, 0.0, codes).to(torch.uint8)
    scale16 = torch.where(constant, centre.abs().half(), scale16)
    zero16 = torch.where(constant, -centre.sign().half(), zero16)
    return codes.view(shape), scale16.view(shape[0], -1), zero16.view(shape[0], -1)


def mean(values: Tensor, importance: Tensor | None) -> Tensor:
    """`[G, g]` -> `[G, 1]`. `importance` `[G, g]` sums to 1 in each group; all count the same without it."""
    if importance is None:
        return values.mean(1, keepdim=True)
    return (values * importance).sum(1, keepdim=True)
