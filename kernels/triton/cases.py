"""What compile_matrix compiles, and what it allows: names and numbers, without torch or triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

# Compute capability -> KiB of shared memory a block can have.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
FORMATS = {  # (name, group size) of a matrix
    "int2": ("int2", 64),
    "int2-g16": ("int2", 16),
    "int3": ("int3", 64),
    "int4": ("int4", 64),
    "int8": ("int8", 0),
    "bfloat16": ("bfloat16", 0),
    "float16": ("float16", 0),
}


@dataclass(frozen=True)
class Case:
    """One compilation. `tokens` of a tile: 1 is the GEMV."""

    target: int
    format: str
    matrix: str
    tokens: int
    dtype: str

    @property
    def kernel(self) -> str:
        return "gemv" if self.tokens == 1 else f"gemm-{self.tokens}"


@dataclass(frozen=True)
class Usage:
    """What a compiled case needs of a GPU: registers a thread, bytes of spills a thread, bytes of shared memory a block."""

    registers: int
    spills: int
    shared: int
    seconds: float

    def fault(self, target: int) -> str:
        """Why it fails the run; "" where it does not."""
        if self.spills:
            return f"spills {self.spills} bytes"
        if self.shared > SHARED[target] * 1024:
            return f"needs {self.shared} bytes of shared memory of {SHARED[target] * 1024}"
        return ""


def cases(targets: list[int], formats: list[str]) -> Iterator[Case]:
    """All cases of these targets and formats, without those that the text of compile_matrix leaves out."""
    for target in targets:
        dtypes = ("float32", "bfloat16" if target >= 80 else "float16")
        for form in formats:
            yield from (Case(target, form, "up", 1, dtype) for dtype in dtypes)
            yield Case(target, form, "down", 1, "float32")
            if target >= 80:
                yield from (Case(target, form, *rest) for rest in product(("up", "down"), (16, 64), dtypes))
