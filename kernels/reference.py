"""The plain expert: dequantize, multiply, activate, multiply. Every faster kernel is tested against this one.

    y = down(act(up(x)))      act is the family's own gate and activation, on the up rows in the source's order

16-bit twins are multiplied in the dtype of `x`, as transformers does with the same weights; quantized twins in float32.

Letters: M tokens of one expert, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import linear

from apex_engine.kernels.layout import RAW, Layout, dequantize

Activation = Callable[[Tensor], Tensor]


def expert_ffn(x: Tensor, views: dict[str, Tensor], layout: Layout, activate: Activation) -> Tensor:
    """Output `[M, H]` of one expert for its tokens `x` `[M, H]`, before the gate weight, in the dtype of `x`.

    `views` are the typed fields of the expert's slot (`Layout.views`); `activate` maps `[M, rows of up]` to `[M, I]`.
    """
    hidden = activate(_linear(x, views, "up", layout))
    return _linear(hidden, views, "down", layout).to(x.dtype)


def _linear(x: Tensor, views: dict[str, Tensor], matrix: str, layout: Layout) -> Tensor:
    if layout.format(matrix).name in RAW:
        weight = views[f"{matrix}.weight"].to(x.dtype)
    else:
        x, weight = x.float(), dequantize(views, matrix, layout)
    bias = views.get(f"{matrix}.bias")
    return linear(x, weight, None if bias is None else bias.to(x.dtype))
