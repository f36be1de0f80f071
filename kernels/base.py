"""What every kernel is given and gives: the interface, the routing of a step, an expert's activation.

Letters: T tokens of a step, M tokens of one expert, K chosen experts a token, S slots, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

Views = dict[str, Tensor]  # the typed fields of one slot, from `Layout.views`


@dataclass(frozen=True)
class Activation:
    """What an expert does beside its matrices.

    apply   maps the up rows `[M, 2 I]` (`[M, I]` without gate) to `[M, I]`
    finish  maps the output `[M, H]` to the one that is weighted, where the family has such a norm
    swiglu  `apply` is silu(first half of the rows) * second half, which kernels fuse
    """

    apply: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], Tensor] | None = None
    swiglu: bool = False

    @classmethod
    def of(
        cls, apply: Callable[[Tensor], Tensor], gated: bool, finish: Callable[[Tensor], Tensor] | None
    ) -> Activation:
        """Finds out by trying whether `apply` is SwiGLU; large values tell variants that clamp."""
        probe = torch.linspace(-300, 300, 64).view(4, 16)
        return cls(apply, finish, gated and torch.equal(apply(probe), swiglu(probe)))


def swiglu(rows: Tensor) -> Tensor:
    """Up rows `[M, 2 I]`, all gates, then all ups -> `[M, I]`."""
    gate, up = rows.chunk(2, -1)
    return silu(gate).mul_(up)


class Routed(NamedTuple):
    """The (token, choice) pairs that some experts of a step serve, grouped by expert; int64.

    The i-th expert serves the pairs first[i] .. first[i + 1] of `tokens` (row of x) and `rows` (row of the output, which is
    token * K + choice).
    """

    first: NDArray[np.int64]
    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]


class Kernel(Protocol):
    """Computes experts straight from the slots of one pool. Chosen once, when the pool is made."""

    name: str

    def __call__(
        self, x: Tensor, slots: Sequence[int], routed: Routed, gates: Tensor, activation: Activation, out: Tensor
    ) -> None:
        """out[row] = gates[row] * expert(x[token]) for every pair, and nothing else of `out`.

        `x` `[T, H]`, `slots` of the experts, `gates` float32 `[T K]`, `out` float32 `[T K, H]`.
        """
