"""Codes of 2, 3 or 4 bits in bytes.

A row of K codes is cut into groups of `group` consecutive codes. With c = 8 / bits codes a byte, byte j of a group holds
the codes j, j + group/c, j + 2 group/c, ... from its lowest bits up: a kernel that loads the group's bytes once and shifts them
gets c contiguous runs of codes. Three bits are two planes: the two low bits packed as above, then the high bit packed
as above (eight to a byte). The unpacked form is one uint8 a code.

Letters: K codes a row, G groups a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,)}  # bits -> widths of the planes, lowest bits first
GROUP_SIZES = (8, 16, 32, 64, 128, 256)  # a power of two: a whole number of bytes in every plane


def pack(codes: Tensor, bits: int, group: int) -> list[Tensor]:
    """uint8 `[..., K]` with values below 2**bits -> one uint8 `[..., K * width / 8]` for each plane of `bits`."""
    planes, shift = [], 0
    for width in PLANES[bits]:
        plane = (codes >> shift) & ((1 << width) - 1)
        planes.append(_pack_plane(plane, width, group))
        shift += width
    return planes


def unpack(planes: list[Tensor], bits: int, group: int) -> Tensor:
    """Inverse of `pack`: the planes of `bits` -> uint8 codes `[..., K]`."""
    codes, shift = None, 0
    for width, packed in zip(PLANES[bits], planes, strict=True):
        plane = _unpack_plane(packed, width, group) << shift
        codes = plane if codes is None else codes | plane
        shift += width
    assert codes is not None
    return codes


def _pack_plane(plane: Tensor, width: int, group: int) -> Tensor:
    per_byte = 8 // width
    grouped = plane.unflatten(-1, (-1, per_byte, group // per_byte))  # [..., G, c, group/c]
    packed = grouped[..., 0, :].clone()
    for i in range(1, per_byte):
        packed |= grouped[..., i, :] << (i * width)
    return packed.flatten(-2)


def _unpack_plane(packed: Tensor, width: int, group: int) -> Tensor:
    per_byte = 8 // width
    grouped = packed.unflatten(-1, (-1, 1, group // per_byte))  # [..., G, 1, group/c]
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
    return ((grouped >> shifts) & ((1 << width) - 1)).flatten(-3)
