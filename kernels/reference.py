"""The plain expert: dequantize, multiply, activate, multiply. Every faster kernel is tested against this one.

    y = down(act(up(x)))      act is the family's own gate and activation, on the up rows in the source's order

16-bit twins are multiplied in the dtype of `x`, as transformers does with the same weights; quantized twins in float32.

The CPU kernels quantize the inputs of a matrix with grouped codes to int8, one scale for each group (`round_inputs`), and then
multiply integers. `Reference(..., round_inputs=True)` does the same to its float inputs: it is their truth, and what they
hand large batches to, so that a token's result does not depend on how many tokens there are.

Letters: T tokens of a step, M tokens of one expert, K chosen experts a token, S slots, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from apex_engine.kernels.base import Activation, Routed, Views, swiglu
from apex_engine.kernels.layout import Layout, dequantize


class Reference:
    """One expert after the other, in torch, on any device."""

    def __init__(self, layout: Layout, memory: Tensor, round_inputs: bool = False) -> None:
        """`memory`: uint8 `[S, stride]`."""
        self.name = "torch"
        self._layout, self._round = layout, round_inputs
        self._views = [layout.views(slot) for slot in memory]  # made once: they stay where they are
        self._plain = bool(layout.up.raw and layout.down.raw) and not layout.shape.bias

    def __call__(
        self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, activation: Activation, out: Tensor
    ) -> None:
        def expert(some: Tensor, slot: int) -> Tensor:
            views = self._views[slot]
            if self._plain and views["up.weight"].dtype == some.dtype:  # the same, in as few calls as it takes
                rows = linear(some, views["up.weight"])
                hidden = swiglu(rows) if activation.swiglu else activation.apply(rows)
                return linear(hidden, views["down.weight"])
            return expert_ffn(some, views, self._layout, activation.apply, self._round)

        one_by_one(expert, x, slots, routed, gates, activation, out)


def one_by_one(
    expert: Callable[[Tensor, int], Tensor],
    x: Tensor,
    slots: Sequence[int],
    routed: Routed,
    gates: Tensor,
    activation: Activation,
    out: Tensor,
) -> None:
    """A `Kernel` call by way of `expert`, which maps its tokens `[M, H]` and a slot to its outputs `[M, H]`, before the norm."""
    if len(x) == 1:  # decoding: small tensors cost what their calls cost, so nothing is gathered or scattered
        first, every = routed.first.tolist(), routed.rows.tolist()
        for i, slot in enumerate(slots):
            if first[i] < first[i + 1]:
                row, y = every[first[i]], expert(x, slot)
                torch.mul((activation.finish(y) if activation.finish else y)[0].float(), gates[row], out=out[row])
        return
    first = routed.first.tolist()
    tokens, rows = torch.from_numpy(routed.tokens).to(x.device), torch.from_numpy(routed.rows).to(x.device)
    for i, slot in enumerate(slots):
        pairs = slice(first[i], first[i + 1])
        if pairs.start == pairs.stop:
            continue
        y = expert(x[tokens[pairs]], slot)
        if activation.finish:
            y = activation.finish(y)
        out.index_copy_(0, rows[pairs], y.float() * gates[rows[pairs]].unsqueeze(1))


def unfused(linear: Callable[[Tensor, int, str], Tensor], activation: Activation) -> Callable[[Tensor, int], Tensor]:
    """An `expert` for `one_by_one`: `linear` multiplies float32 `[M, K]` with the matrix "up" or "down" of a slot."""
    return lambda x, slot: linear(activation.apply(linear(x, slot, "up")), slot, "down")


def expert_ffn(
    x: Tensor, views: Views, layout: Layout, apply: Callable[[Tensor], Tensor], rounded: bool = False
) -> Tensor:
    """Output `[M, H]` of one expert for its tokens `x` `[M, H]`, before norm and gate weight, in the dtype of `x`."""
    hidden = apply(matrix_linear(x, views, "up", layout, rounded))
    return matrix_linear(hidden, views, "down", layout, rounded).to(x.dtype)


def matrix_linear(x: Tensor, views: Views, matrix: str, layout: Layout, rounded: bool = False) -> Tensor:
    """`x` `[M, K]` times the matrix "up" or "down", bias included: `[M, N]`, in float32 for a quantized matrix."""
    form = layout.format(matrix)
    if form.raw:
        weight = views[f"{matrix}.weight"].to(x.dtype)
    else:
        x, weight = x.float(), dequantize(views, matrix, layout)
        if rounded and form.grouped:
            x = round_inputs(x, form.group)
    bias = views.get(f"{matrix}.bias")
    return linear(x, weight, None if bias is None else bias.to(x.dtype))


def round_inputs(x: Tensor, group: int) -> Tensor:
    """float32 `x` `[M, K]` -> a * round(x / a), a = absmax / 127 of each group of `group` inputs."""
    grouped = x.unflatten(-1, (-1, group))
    most = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, 0)
    return ((grouped * inverse).round_() * (most / 127)).flatten(-2)
