"""Second moments of what reaches an expert's matrices: which of its columns matter, and which belong together.

For the inputs x of a matrix, over the calibration tokens that chose the expert with gate weight g:

    H = sum g^2 x x^T        the error of a twin W' is then  sum g^2 |W x - W' x|^2 = trace((W - W') H (W - W')^T)

H is kept in blocks of B columns along its diagonal, since all of it would be larger than the expert. Written by
`python -m apex_engine.calibrate`, read by the quantizer.

Letters: E experts, K columns of a matrix, B columns a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from apex_engine.checkpoint.atomic import atomic_path
from apex_engine.errors import ApexError

MOMENTS = "calibration.safetensors"  # beside the checkpoint they were measured on
LEAST_TOKENS = 32  # an expert that fewer tokens chose is treated as if nothing were known
DAMPING = 0.05  # of the mean of the diagonal, added to it: columns that were never used still count


@dataclass(frozen=True)
class MatrixMoments:
    """Of one matrix of one expert: `blocks` float32 `[K / B, B, B]`, damped; `tokens` that chose the expert."""

    blocks: Tensor
    tokens: int

    @property
    def diagonal(self) -> Tensor:
        """`[K]`."""
        return self.blocks.diagonal(dim1=1, dim2=2).flatten()

    @property
    def suffices(self) -> bool:
        """Whether the blocks, and not only their diagonals, are known: as many tokens as columns, and more than one."""
        return self.blocks.shape[1] > 1 and self.tokens >= self.blocks.shape[1]


class Moments:
    """The moments of a calibrated checkpoint. Raises ApexError where there are none, or the file is damaged."""

    def __init__(self, folder: Path) -> None:
        if not folder.exists():
            raise ApexError(f"--importance {folder} does not exist: name a checkpoint that was calibrated")
        self.path = folder / MOMENTS if folder.is_dir() else folder
        if not self.path.is_file():
            raise ApexError(f"{self.path} does not exist: make it with `python -m apex_engine.calibrate {folder}`")
        try:
            self._file = safe_open(self.path, "pt")
            self.fingerprint: str = self._file.metadata()["fingerprint"]
            self.identity: str = self._file.metadata()["identity"]  # in the options of the checkpoint made with them
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise ApexError(f"{self.path} cannot be read ({error}): calibrate again") from None

    def of(self, layer: int, expert: int, matrix: str) -> MatrixMoments | None:
        """Those of "up" or "down" of an expert of the MoE layer with this number in the model; None where nearly no token
        chose it, or nothing but zeros reached the matrix."""
        try:
            tokens = int(self._file.get_tensor(f"{layer}.tokens")[expert])
            if tokens < LEAST_TOKENS:
                return None
            blocks = self._file.get_slice(f"{layer}.{matrix}")[expert]
        except (SafetensorError, IndexError) as error:
            raise ApexError(
                f"{self.path} says nothing of layer {layer}, expert {expert} ({error}): calibrate again"
            ) from None
        found = MatrixMoments(damp(blocks), tokens)
        return found if found.diagonal.min() > 0 else None


def damp(blocks: Tensor) -> Tensor:
    """`blocks` `[K / B, B, B]` themselves, DAMPING of the mean of their diagonal added to it."""
    diagonal = blocks.diagonal(dim1=1, dim2=2)
    diagonal += DAMPING * diagonal.mean()
    return blocks


def block_size(columns: int, most: int, group: int) -> int:
    """Columns a block: the largest divisor of `columns` up to `most` that groups of `group` fill; 1 where there is none."""
    sizes = [size for size in range(group, min(most, columns) + 1, group) if columns % size == 0]
    return sizes[-1] if sizes else 1


def write_moments(folder: Path, fingerprint: str, tensors: dict[str, Tensor]) -> None:
    """`tensors`: for each MoE layer number n "n.tokens" int64 `[E]`, "n.up" and "n.down" float32 `[E, K / B, B, B]`."""
    sha = sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.numpy().data)
    with atomic_path(folder / MOMENTS) as part:
        save_file(tensors, part, metadata={"fingerprint": fingerprint, "identity": sha.hexdigest()[:16]})


def accumulate(sums: Tensor, x: Tensor, gates: Tensor) -> None:
    """Add the tokens `x` `[T, K]` with `gates` `[T]` to the `sums` `[K / B, B, B]` of one matrix."""
    scaled = (x.float() * gates.float()[:, None]).unflatten(1, sums.shape[:2]).transpose(0, 1)  # [K / B, T, B]
    torch.baddbmm(sums, scaled.transpose(1, 2), scaled, out=sums)
