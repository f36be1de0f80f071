"""Search of the clip range, then scale and zero refitted by least squares, in turns with the codes; where the second moments of
the inputs are known, a weight counts as much as the input it is multiplied with.

Letters: N rows, K columns, G groups, g weights a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_engine.checkpoint.moments import MatrixMoments
from apex_engine.quantize.methods.seal import mean, seal

CHUNK = 1 << 20  # weights handled at once: more leave the cache, fewer leave cores idle (measured)
SHRINKS = (1.0, 0.85, 0.7, 0.55, 0.4)  # clip ranges tried, as shares of the full range
REFITS = 3  # rounds of "codes from scale and zero, scale and zero from codes" after each of them


def quantize(
    weight: Tensor, bits: int, group: int, moments: MatrixMoments | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `[N, K]` -> uint8 codes `[N, K]`, float16 scale and zero `[N, G]`, least squares in each group."""
    parts = []
    step = max(1, CHUNK // weight.shape[1])
    importance = None
    if moments:
        importance = moments.diagonal.view(1, -1, group)
        importance = (importance / importance.sum(2, keepdim=True)).expand(step, -1, -1).reshape(-1, group)
    for rows in weight.split(step):
        groups = rows.reshape(-1, group)
        some = None if importance is None else importance[: len(groups)]
        parts.append(seal(groups, *_clip_search(groups, bits, some), bits, rows.shape, some))
    codes, scale, zero = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scale), torch.cat(zero)


def _clip_search(groups: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Best float32 scale and zero `[G, 1]` for `groups` `[G, g]` among all shrunk ranges, each refitted REFITS times.

    `importance` `[G, g]` sums to 1 in each group; all weights count the same without it.
    """
    top = 2**bits - 1
    middle_of_all = mean(groups, importance)
    centred = groups - middle_of_all  # a common offset would drown the sums below
    low, high = centred.aminmax(dim=1, keepdim=True)
    middle, span = (high + low) / 2, (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    best = torch.full_like(middle, -1.0)
    best_scale, best_offset = torch.ones_like(middle), torch.zeros_like(middle)  # w ~ q * scale + offset
    for shrink in SHRINKS:
        scale = span * (shrink / top)
        offset = middle - scale * (top / 2)
        for _ in range(REFITS):
            codes = ((centred - offset) / scale).round_().clamp_(0, top)
            # Least squares of centred ~ codes * scale + offset, where the mean of the centred weights is 0. What it
            # explains of their square is covariance^2 / variance: the largest share explained is the smallest error.
            mean_code = mean(codes, importance)
            variance = mean(codes * codes, importance) - mean_code * mean_code
            covariance = mean(codes * centred, importance)
            fitted = (variance > 1e-6) & (covariance > 0)
            scale = torch.where(fitted, covariance / variance, scale)
            offset = torch.where(fitted, -scale * mean_code, offset)
            explained = torch.where(fitted, covariance * scale, 0.0)
            better = explained > best
            best = torch.where(better, explained, best)
            best_scale = torch.where(better, scale, best_scale)
            best_offset = torch.where(better, offset, best_offset)
    return best_scale, -(best_offset + middle_of_all) / best_scale
