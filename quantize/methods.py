"""One float32 matrix -> the fields of its twin. No file, no model.

Every method returns the codes, scale and zero as they are stored, so the error reported is the error the runtime has.

  hqq   half-quadratic zero-point optimisation, by the hqq library, groups along the inputs (its axis=1)
  clip  search of the clip range, then scale and zero refitted by least squares, in turns with the codes; where the second
        moments of the inputs are known, a weight counts as much as the input it is multiplied with
  gptq  clip, then error feedback across the columns (`gptq.py`), where the second moments are known well enough
  int8  symmetric, absmax of each row, by bitsandbytes' vector-wise quantizer

Letters: N rows, K columns, G groups, g weights a group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from apex_engine.checkpoint.moments import MatrixMoments
from apex_engine.kernels.layout import RAW, MatrixFormat
from apex_engine.kernels.packing import pack
from apex_engine.quantize.gptq import quantize_gptq

CHUNK = 1 << 20  # weights handled at once by `clip`: more leave the cache, fewer leave cores idle (measured)
SHRINKS = (1.0, 0.85, 0.7, 0.55, 0.4)  # clip ranges tried, as shares of the full range
REFITS = 3  # rounds of "codes from scale and zero, scale and zero from codes" after each of them


def encode(
    weight: Tensor, form: MatrixFormat, method: str = "clip", moments: MatrixMoments | None = None
) -> dict[str, Tensor]:
    """Fields of `weight` `[N, K]` (any float dtype) in `form`, by the names of `Layout` without their matrix prefix.

    `method`, one of METHODS, and `moments`, on the weight's device, are used by the grouped formats only. Raises ValueError
    where the weight has a NaN or an infinity or does not fit the format's range.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("has a NaN or an infinite value")
    if form.name in RAW:
        narrowed = weight.to(RAW[form.name])
        if not torch.isfinite(narrowed).all():
            raise ValueError(f"has a value beyond the range of {form.name}")
        return {"weight": narrowed}
    if form.name == "int8":
        # Always on the CPU, where the library takes float32.
        return dict(zip(("codes", "scale"), quantize_int8(weight.float().cpu()), strict=True))
    codes, scale, zero = METHODS[method](weight.float(), form.bits, form.group, moments)
    if not (torch.isfinite(scale).all() and torch.isfinite(zero).all()):
        raise ValueError("has a value beyond the range of the float16 scales")
    planes = {f"codes{i}": plane for i, plane in enumerate(pack(codes, form.bits, form.group))}
    return {**planes, "scale": scale, "zero": zero}


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 `[N, K]` -> int8 codes `[N, K]`, float32 scale `[N]`: w ~ q * scale, scale = absmax / 127."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of 4-bit kernels that are not used here
    from bitsandbytes.functional import int8_vectorwise_quant  # a heavy import that only INT8 twins need

    codes, absmax, _ = int8_vectorwise_quant(weight)
    codes[absmax == 0] = 0  # the quantizer divides by the absmax
    return codes, absmax / 127


def quantize_hqq(
    weight: Tensor, bits: int, group: int, moments: MatrixMoments | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `[N, K]` -> uint8 codes `[N, K]`, float16 scale and zero `[N, G]`, by the hqq library; `moments` are not used."""
    from hqq.core.quantize import Quantizer  # a heavy import that only this method needs

    _, meta = Quantizer.quantize(
        weight,
        nbits=bits,
        group_size=group,
        axis=1,
        optimize=True,
        round_zero=False,
        bitpack=False,
        device=str(weight.device),
    )
    return _seal(weight.view(-1, group), meta["scale"], meta["zero"], bits, weight.shape)


def quantize_clip(
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
        parts.append(_seal(groups, *_clip_search(groups, bits, some), bits, rows.shape, some))
    codes, scale, zero = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scale), torch.cat(zero)


def quantize_with_feedback(
    weight: Tensor, bits: int, group: int, moments: MatrixMoments | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `[N, K]` -> uint8 codes `[N, K]`, float16 scale and zero `[N, G]`: `clip`, and `gptq.py` on top where it can."""
    found = quantize_clip(weight, bits, group, moments)
    if moments and feeds_back(moments, group):
        return quantize_gptq(weight, *found, bits, moments.blocks)
    return found


def feeds_back(moments: MatrixMoments | None, group: int) -> bool:
    """Whether `gptq` does more than `clip` with these moments."""
    return moments is not None and moments.suffices and moments.blocks.shape[1] % group == 0


METHODS: dict[str, Callable[[Tensor, int, int, MatrixMoments | None], tuple[Tensor, Tensor, Tensor]]] = {
    "hqq": quantize_hqq,
    "clip": quantize_clip,
    "gptq": quantize_with_feedback,
}


def _clip_search(groups: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Best float32 scale and zero `[G, 1]` for `groups` `[G, g]` among all shrunk ranges, each refitted REFITS times.

    `importance` `[G, g]` sums to 1 in each group; all weights count the same without it.
    """
    top = 2**bits - 1
    middle_of_all = _mean(groups, importance)
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
            mean_code = _mean(codes, importance)
            variance = _mean(codes * codes, importance) - mean_code * mean_code
            covariance = _mean(codes * centred, importance)
            fitted = (variance > 1e-6) & (covariance > 0)
            scale = torch.where(fitted, covariance / variance, scale)
            offset = torch.where(fitted, -scale * mean_code, offset)
            explained = torch.where(fitted, covariance * scale, 0.0)
            better = explained > best
            best = torch.where(better, explained, best)
            best_scale = torch.where(better, scale, best_scale)
            best_offset = torch.where(better, offset, best_offset)
    return best_scale, -(best_offset + middle_of_all) / best_scale


def _mean(values: Tensor, importance: Tensor | None) -> Tensor:
    """`[G, g]` -> `[G, 1]`. `importance` `[G, g]` sums to 1 in each group; all count the same without it."""
    if importance is None:
        return values.mean(1, keepdim=True)
    return (values * importance).sum(1, keepdim=True)


def _seal(
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
    error = _mean(((codes - z) * s - groups).square_(), importance)

    mean = _mean(groups, importance)
    constant_error = _mean((mean.half().float() - groups).square_(), importance)
    constant = ~usable | (constant_error < error)
    codes = torch.where(constant, 0.0, codes).to(torch.uint8)
    scale16 = torch.where(constant, mean.abs().half(), scale16)
    zero16 = torch.where(constant, -mean.sign().half(), zero16)
    return codes.view(shape), scale16.view(shape[0], -1), zero16.view(shape[0], -1)
