"""The methods by which a grouped matrix (2, 3 or 4 bits) can be made: a line here, and a module of that name beside this one with
a function `quantize`. Imports nothing slow: the command line reads the names.

Every method returns the codes, scale and zero as they are stored, so the error reported is the error the runtime has.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from apex_engine.checkpoint.moments import MatrixMoments

METHODS = (
    "hqq",  # half-quadratic zero-points, by the hqq library
    "clip",  # the best clip range of each group, then least squares
    "gptq",  # clip, then error feedback across the columns; needs second moments
)


class Method(Protocol):
    """float32 `[N, K]` -> uint8 codes `[N, K]`, float16 scale and zero `[N, K / group]`; `moments` of the inputs, on the weight's
    device, where they are known."""

    def __call__(
        self, weight: Tensor, bits: int, group: int, moments: MatrixMoments | None = None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def method(name: str) -> Method:
    """The one called `name` in METHODS."""
    assert name in METHODS
    found: Method = import_module(f"{__package__}.{name}").quantize
    return found
