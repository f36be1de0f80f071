"""Tuning: the tile of each kernel by the size of its inputs and weights. Says beside each row what it was measured by."""

from __future__ import annotations

from typing import NamedTuple

DECODE_TOKENS = 16  # a step of up to so many tokens is decode; not measured yet
LEAST_DEPTH = 16  # of a tl.dot


class Blocks(NamedTuple):
    """A tile, and how many warps and pipeline stages work on it."""

    tokens: int
    rows: int
    bytes: int  # of a row: of the first plane, or elements of an int8 or 16-bit matrix
    warps: int
    stages: int


GEMV = {  # by (bytes of an element of x, bits of the matrix)
    (2, 2): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (2, 3): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (2, 4): Blocks(1, 16, 128, 4, 2),  # not measured yet; a group of 256 is a run of 128 bytes
    (2, 8): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (2, 16): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (4, 2): Blocks(1, 16, 128, 8, 2),  # not measured yet; four warps spill
    (4, 3): Blocks(1, 16, 128, 8, 2),  # not measured yet
    (4, 4): Blocks(1, 16, 128, 8, 2),  # not measured yet
    (4, 8): Blocks(1, 16, 128, 4, 2),  # not measured yet
    (4, 16): Blocks(1, 16, 128, 4, 2),  # not measured yet; rows of 256 spill
}
GEMM = {  # by (bytes of an element of x, tokens of a tile)
    (2, 16): Blocks(16, 64, 32, 4, 3),  # not measured yet
    (2, 64): Blocks(64, 64, 32, 8, 3),  # not measured yet; four warps spill
    (4, 16): Blocks(16, 32, 32, 4, 2),  # not measured yet
    (4, 64): Blocks(32, 32, 16, 8, 2),  # not measured yet; four warps spill
}
