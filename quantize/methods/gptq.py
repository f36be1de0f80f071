"""Codes, scales and zeros of one matrix for the smallest error of its output, rather than of its weights.

With H the second moments of the inputs (checkpoint/moments.py), in blocks of B columns that are treated one after the other:

  error feedback  Column by column, in decreasing order of H's diagonal, the error of rounding is spread over the columns
                  still to be rounded, which can make up for it: GPTQ (Frantar et al. 2022), with scales fixed beforehand.
  then, ROUNDS times,
  refit           scale and zero of all groups of a row at once: least squares under H, codes fixed
  descent         each code in turn to its best value with all others fixed; H's residual is kept up to date

A row keeps what a round gave it only if its error fell.

Letters: N rows, K columns, B columns a block, G groups a block, g columns a group; columns come first in memory `[B, N]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex_engine.checkpoint.moments import MatrixMoments
from apex_engine.quantize.methods import clip

ROWS = 4096  # handled at once
STEP = 32  # columns whose effect on all later ones is applied in one matrix product
ROUNDS = 3
RIDGE = 1e-5  # of the refit, relative: keeps groups whose codes are all equal where they are


def quantize(
    weight: Tensor, bits: int, group: int, moments: MatrixMoments | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `[N, K]` -> uint8 codes `[N, K]`, float16 scale and zero `[N, K / g]`: `clip`, and `refine` on top where it can."""
    found = clip.quantize(weight, bits, group, moments)
    if moments and feeds_back(moments, group):
        return refine(weight, *found, bits, moments.blocks)
    return found


def feeds_back(moments: MatrixMoments | None, group: int) -> bool:
    """Whether this does more than `clip` with these moments."""
    return moments is not None and moments.suffices and moments.blocks.shape[1] % group == 0


def refine(
    weight: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bits: int, blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Better codes uint8 `[N, K]`, scale and zero float16 `[N, K / g]`, from those given, e.g. by `clip`.

    `weight` float32 `[N, K]`; `blocks`: H, positive definite, float32 `[K / B, B, B]`, where g divides B.
    """
    group = weight.shape[1] // scale.shape[1]
    codes, scale, zero = codes.clone(), scale.clone(), zero.clone()
    for b, h in enumerate(blocks):
        size = len(h)
        order = h.diagonal().argsort(descending=True, stable=True)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(h[order][:, order]))
        upper = torch.linalg.cholesky(inverse, upper=True)
        columns, groups = slice(b * size, (b + 1) * size), slice(b * size // group, (b + 1) * size // group)
        for start in range(0, len(weight), ROWS):
            rows = slice(start, start + ROWS)
            block = Block(weight[rows, columns].T.contiguous(), h, bits, group)
            found = block.solve(order, upper, codes[rows, columns], scale[rows, groups], zero[rows, groups])
            codes[rows, columns], scale[rows, groups], zero[rows, groups] = found
    return codes, scale, zero


class Block:
    """Some rows and B columns of a matrix: `w` float32 `[B, N]`."""

    def __init__(self, w: Tensor, h: Tensor, bits: int, group: int) -> None:
        self.w, self.h, self.top, self.group = w, h, 2**bits - 1, group

    def solve(
        self, order: Tensor, upper: Tensor, codes: Tensor, scale: Tensor, zero: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """codes `[N, B]`, scale and zero `[N, G]`, as given and as returned. `order`, `upper`: as for `feed_back`."""
        q, s, z = codes.T.float(), scale.T.contiguous(), zero.T.contiguous()
        least = self.error(q, s, z)
        for turn in range(1 + ROUNDS):
            new_s, new_z = (s, z) if turn == 0 else self.refit(q, s, z)
            new_q = self.descend(q, new_s, new_z) if turn else self.feed_back(order, upper, s, z)
            error = self.error(new_q, new_s, new_z)
            better = error < least
            least = torch.where(better, error, least)
            q, s, z = (torch.where(better, *pair) for pair in ((new_q, q), (new_s, s), (new_z, z)))
        return q.T.to(torch.uint8), s.T, z.T

    def _value(self, q: Tensor, s: Tensor, z: Tensor) -> Tensor:
        return ((q.unflatten(0, (-1, self.group)) - z.float()[:, None]) * s.float()[:, None]).flatten(0, 1)

    def error(self, q: Tensor, s: Tensor, z: Tensor) -> Tensor:
        """Squared output error of each row, `[N]`."""
        missed = self.w - self._value(q, s, z)
        return (missed * (self.h @ missed)).sum(0)

    def _round(self, value: Tensor, s: Tensor, z: Tensor) -> Tensor:
        return (value / s + z).round_().clamp_(0, self.top)

    def _columns(self, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scale, the same to divide by, and zero of each column, `[B, N]`."""
        wide = s.float().repeat_interleave(self.group, 0)
        return wide, torch.where(wide > 0, wide, 1.0), z.float().repeat_interleave(self.group, 0)

    def feed_back(self, order: Tensor, upper: Tensor, s: Tensor, z: Tensor) -> Tensor:
        """Codes `[B, N]`. `order` of the columns; `upper`: the Cholesky factor of the inverse of H in that order."""
        w = self.w[order]
        scale, divisor, zero = (part[order] for part in self._columns(s, z))
        q, size = torch.empty_like(w), len(w)
        errors = torch.empty_like(w[:STEP])
        for start in range(0, size, STEP):
            stop = min(start + STEP, size)
            for k in range(start, stop):
                q[k] = self._round(w[k], divisor[k], zero[k])
                error = (w[k] - (q[k] - zero[k]) * scale[k]) / upper[k, k]
                w[k + 1 : stop].addr_(upper[k, k + 1 : stop], error, alpha=-1)
                errors[k - start] = error
            w[stop:].addmm_(upper[start:stop, stop:].T, errors[: stop - start], alpha=-1)
        result = torch.empty_like(q)
        result[order] = q
        return result

    def descend(self, q: Tensor, s: Tensor, z: Tensor) -> Tensor:
        """One sweep over the columns: codes `[B, N]` of no larger error."""
        scale, divisor, zero = self._columns(s, z)
        q, value = q.clone(), self._value(q, s, z)
        residual = self.h @ (self.w - value)
        pull = self.h.diagonal()
        for start in range(0, len(q), STEP):
            part = slice(start, min(start + STEP, len(q)))
            near, moves = residual[part].clone(), torch.empty_like(residual[part])
            for i, k in enumerate(range(part.start, part.stop)):
                q[k] = self._round(value[k] + near[i] / pull[k], divisor[k], zero[k])
                moves[i] = (q[k] - zero[k]) * scale[k] - value[k]
                near.addr_(self.h[part, k], moves[i], alpha=-1)
            residual.addmm_(self.h[:, part], moves, alpha=-1)
        return q

    def refit(self, q: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero float16 `[G, N]`: the change of scale and offset (w ~ q * scale + offset) that lessens the error
        most; where it leaves the range of float16, none."""
        grouped = q.unflatten(0, (-1, self.group)).permute(2, 0, 1)  # [N, G, g]
        h = self.h.unflatten(1, (-1, self.group)).unflatten(0, (-1, self.group))  # [G, g, G, g]
        count = grouped.shape[1]
        by_code = torch.einsum("nig,igjh->nijh", grouped, h)  # [N, G, G, g]
        ones = h.sum((1, 3)).expand(len(grouped), -1, -1)
        mixed = by_code.sum(3)  # code against offset
        normal = torch.cat(
            [
                torch.cat([torch.einsum("nijh,njh->nij", by_code, grouped), mixed], 2),
                torch.cat([mixed.transpose(1, 2), ones], 2),
            ],
            1,
        )
        pull = (self.h @ (self.w - self._value(q, s, z))).unflatten(0, (-1, self.group)).permute(2, 0, 1)
        right = torch.cat([(pull * grouped).sum(2), pull.sum(2)], 1)
        diagonal = normal.diagonal(dim1=1, dim2=2)
        diagonal += RIDGE * diagonal.mean(1, keepdim=True)
        change, _ = torch.linalg.solve_ex(normal, right[..., None])
        change = change[..., 0].T  # [2 G, N]
        scale = s.float() + change[:count]
        offset = -z.float() * s.float() + change[count:]
        new_s = scale.half()
        new_z = (-offset / new_s.float()).half()
        usable = (new_s > 0) & torch.isfinite(new_s) & torch.isfinite(new_z)
        return torch.where(usable, new_s, s), torch.where(usable, new_z, z)
