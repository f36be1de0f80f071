"""Where the parts of one expert lie in its blob.

A blob is one row of uint8: the up matrix (gate and up rows in the source's own order), the down matrix, their scales,
zeros and biases, each at a 64-byte boundary, padded to a multiple of 4096 bytes so that it can be read with O_DIRECT and
copied whole. Matrices are stored `[N, K]` (out, in) whatever the source's orientation, and groups run along K.

Formats of a matrix, by FORMATS, the one table of them:
  int2, int3, int4  w ~ (q - zero) * scale, codes packed as in packing.py, scale and zero float16 `[N, K / group]`
  int8              w ~ q * scale, codes int8 `[N, K]`, scale float32 `[N]`
  bfloat16, float16 the weight itself

The two matrices of an expert may have any two formats. A new format gets a row of FORMATS here and, where its width is new, of
PLANES in packing.py; one of a new kind also gets its parts (`MatrixFormat.parts`) and its arithmetic (`dequantize`). With that it
is stored, described, read and computed by the reference. Then quantize/forms.py has to name it, and quantize/methods/ to make it;
and each faster kernel has to take it, or registry.py to keep it from that kernel.

Letters: N rows (outputs), K columns (inputs), H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex_engine.kernels.packing import PLANES, unpack

ALIGN = 4096  # of a blob: O_DIRECT wants whole logical blocks, and a page is the largest in use
FIELD_ALIGN = 64  # of a field inside a blob: one cache line
MATRICES = ("up", "down")


class Coding(NamedTuple):
    """How a format holds one weight."""

    bits: int
    dtype: torch.dtype  # of the packed codes, of the codes or of the weight
    planes: tuple[int, ...] = ()  # widths of the code planes of a format with groups, lowest bits first


FORMATS = {
    "int2": Coding(2, torch.uint8, PLANES[2]),
    "int3": Coding(3, torch.uint8, PLANES[3]),
    "int4": Coding(4, torch.uint8, PLANES[4]),
    "int8": Coding(8, torch.int8),
    "bfloat16": Coding(16, torch.bfloat16),
    "float16": Coding(16, torch.float16),
}
RAW = {name: coding.dtype for name, coding in FORMATS.items() if coding.dtype.is_floating_point}
BIASES = {"float32": torch.float32, **RAW}  # dtypes of them


@dataclass(frozen=True)
class ExpertShape:
    """The matrices of one expert. `gated`: the up matrix holds gate and up, 2 I rows instead of I."""

    hidden: int
    intermediate: int
    gated: bool
    bias: str = ""  # dtype name of the biases; "" without

    def matrix(self, name: str) -> tuple[int, int]:
        """(N, K) of "up" or "down"."""
        if name == "up":
            return (2 if self.gated else 1) * self.intermediate, self.hidden
        return self.hidden, self.intermediate

    @property
    def weights(self) -> int:
        """Weights of one expert, biases not counted."""
        return sum(n * k for n, k in map(self.matrix, MATRICES))


@dataclass(frozen=True)
class MatrixFormat:
    """`name` as in FORMATS; `group` is the group size along K, 0 for the formats without groups. Raises ValueError for others."""

    name: str
    group: int = 0

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f"no format {self.name!r} for a matrix: there are {', '.join(FORMATS)}")
        if self.grouped != (self.group > 0):
            raise ValueError(
                f"{self.name} has {'groups, of a size above 0' if self.grouped else 'no groups'}: {self.group}"
            )

    @property
    def bits(self) -> int:
        return FORMATS[self.name].bits

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the code planes, lowest bits first; () without groups."""
        return FORMATS[self.name].planes

    @property
    def grouped(self) -> bool:
        return bool(self.planes)

    @property
    def raw(self) -> torch.dtype | None:
        """The dtype of a matrix that is kept as it is; None for codes."""
        return RAW.get(self.name)

    @property
    def held(self) -> tuple[str, ...]:
        """The parts that hold the codes, one a plane, or the weights."""
        if self.grouped:
            return tuple(f"codes{i}" for i in range(len(self.planes)))
        return ("weight",) if self.raw else ("codes",)

    def parts(self, n: int, k: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) of all parts of an `[N, K]` matrix."""
        dtype = FORMATS[self.name].dtype
        if self.grouped:
            yield from ((name, dtype, (n, k * width // 8)) for name, width in zip(self.held, self.planes, strict=True))
            yield from ((name, torch.float16, (n, k // self.group)) for name in ("scale", "zero"))
        else:
            yield self.held[0], dtype, (n, k)
            if not self.raw:
                yield "scale", torch.float32, (n,)


class Field(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the blob
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """One twin's blob: the expert's shape and the format of each matrix; everything else follows from them."""

    shape: ExpertShape
    up: MatrixFormat
    down: MatrixFormat

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        end, fields = 0, []
        for name, dtype, shape in self._parts():
            offset = -(-end // FIELD_ALIGN) * FIELD_ALIGN
            nbytes = dtype.itemsize * prod(shape)
            fields.append(Field(name, dtype, shape, offset, nbytes))
            end = offset + nbytes
        return tuple(fields)

    @cached_property
    def stride(self) -> int:
        """Bytes of the blob, padding included."""
        end = self.fields[-1].offset + self.fields[-1].nbytes
        return -(-end // ALIGN) * ALIGN

    def format(self, matrix: str) -> MatrixFormat:
        return self.up if matrix == "up" else self.down

    @property
    def bits_per_weight(self) -> float:
        """Real bits: scales, zeros, biases and padding included."""
        return 8 * self.stride / self.shape.weights

    def _parts(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        for matrix in MATRICES:
            n, k = self.shape.matrix(matrix)
            form = self.format(matrix)
            if form.grouped and k % form.group:
                raise ValueError(f"group size {form.group} does not divide the {k} inputs of {matrix}")
            yield from ((f"{matrix}.{part}", dtype, shape) for part, dtype, shape in form.parts(n, k))
            if self.shape.bias:
                yield f"{matrix}.bias", BIASES[self.shape.bias], (n,)

    def views(self, blob: Tensor) -> dict[str, Tensor]:
        """Typed views of every field into `blob`, uint8 `[stride]`, contiguous, at an address that is a multiple of 64."""
        return {f.name: blob[f.offset : f.offset + f.nbytes].view(f.dtype).view(f.shape) for f in self.fields}

    def describe(self) -> dict[str, Any]:
        """JSON form; `Layout.parse` reads it back. Offsets are written too, for readers in other languages."""
        return {
            "shape": asdict(self.shape),
            "up": asdict(self.up),
            "down": asdict(self.down),
            "stride": self.stride,
            "fields": {f.name: [str(f.dtype).removeprefix("torch."), list(f.shape), f.offset] for f in self.fields},
        }

    @classmethod
    def parse(cls, described: dict[str, Any]) -> Layout:
        """Raises ValueError where the described offsets are not the ones this version computes."""
        layout = cls(
            ExpertShape(**described["shape"]), MatrixFormat(**described["up"]), MatrixFormat(**described["down"])
        )
        if layout.describe() != described:
            raise ValueError("the blob layout was written by an incompatible version")
        return layout


def dequantize(views: dict[str, Tensor], matrix: str, layout: Layout) -> Tensor:
    """The float32 `[N, K]` matrix "up" or "down" that the fields of one blob stand for."""
    form = layout.format(matrix)
    held = [views[f"{matrix}.{part}"] for part in form.held]
    if form.grouped:
        codes = unpack(held, form.bits, form.group).unflatten(-1, (-1, form.group)).float()  # [N, G, group]
        scale, zero = views[f"{matrix}.scale"].float(), views[f"{matrix}.zero"].float()
        return ((codes - zero[..., None]) * scale[..., None]).flatten(-2)
    return held[0].float() if form.raw else held[0].float() * views[f"{matrix}.scale"][:, None]
