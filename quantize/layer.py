"""One piece of the quantizer's work: the expert files of one layer. It goes from files to files, so that any process can do any
piece, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from apex_engine.checkpoint.expert_file import expert_file, expert_file_bytes, expert_file_name
from apex_engine.checkpoint.manifest import FileEntry
from apex_engine.checkpoint.moments import MatrixMoments, Moments
from apex_engine.checkpoint.twin import Twin
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import MATRICES
from apex_engine.quantize.blob import make_blob
from apex_engine.quantize.methods.gptq import feeds_back
from apex_engine.quantize.report import LayerErrors
from apex_engine.quantize.source.model import Source

Progress = Callable[[int], None]  # called with the number of experts just finished


@dataclass(frozen=True)
class LayerWork:
    """What the expert files of one layer are made of, and where they go."""

    source: Path  # the model's directory
    number: int  # of the layer in the model
    folder: Path  # the apex checkpoint under way
    twins: tuple[Twin, ...]
    method: str = "clip"  # of METHODS, for grouped matrices
    moments: Path | None = None  # a calibrated checkpoint, or its file of second moments
    device: str = "cpu"  # does the arithmetic

    @property
    def files(self) -> tuple[str, ...]:
        """Their names in the folder, one for each twin."""
        return tuple(expert_file_name(self.number, twin.name) for twin in self.twins)

    def nbytes(self, experts: int) -> int:
        """Of its files."""
        return sum(expert_file_bytes(twin.layout, experts) for twin in self.twins)


@dataclass(frozen=True)
class LayerDone:
    """What was written, by the files' names, and what it costs in error."""

    files: dict[str, FileEntry]
    errors: LayerErrors


def write_layer(work: LayerWork, source: Source | None = None, progress: Progress = lambda _: None) -> LayerDone:
    """The expert files of `work`. `source` is that of `work.source`, where it is open already.

    Raises ApexError naming the expert of which nothing sound can be made; OSError of a full disk. Nothing half written is left.
    """
    source = source or Source(work.source)
    layer = source.layer(work.number)
    moments = Moments(work.moments) if work.moments else None
    errors: LayerErrors = {}
    with ExitStack() as stack:
        writers = [
            stack.enter_context(expert_file(work.folder / name, twin.layout, layer.experts))
            for name, twin in zip(work.files, work.twins, strict=True)
        ]
        for e, expert in enumerate(source.expert(layer)):
            try:
                blobs, sums = _make_twins(work, e, expert, moments)
            except ValueError as error:
                raise ApexError(
                    f"{layer.module}, expert {e}: {error}. Nothing sound can be made of it: download the source again, "
                    "or take a sound checkpoint"
                ) from None
            for writer, blob in zip(writers, blobs, strict=True):
                writer.append(blob)
            for kind, row in sums.items():
                errors.setdefault(kind, []).append(row)
            progress(1)
    return LayerDone({name: writer.entry() for name, writer in zip(work.files, writers, strict=True)}, errors)


def _make_twins(
    work: LayerWork, e: int, expert: dict[str, Tensor], moments: Moments | None
) -> tuple[list[Tensor], dict[str, list[float]]]:
    """The blobs of expert `e`, one for each twin, and its row of each of the `LayerErrors`."""
    weights = {name: weight.to(work.device) for name, weight in expert.items()}
    known = {matrix: _moments_of(work, e, matrix, moments) for matrix in MATRICES}
    blobs: list[Tensor] = []
    sums: dict[str, list[float]] = {}
    for twin in work.twins:
        blob, pairs = make_blob(weights, twin.layout, work.method, known)
        blobs.append(blob)
        sums |= {f"{twin.name}.{matrix}": pair for matrix, pair in pairs.items()}
        if moments:
            sums |= {f"as.{twin.name}.{m}": [_fallback(work.method, twin, m, known[m])] for m in twin.grouped}
    return blobs, sums


def _moments_of(work: LayerWork, e: int, matrix: str, moments: Moments | None) -> MatrixMoments | None:
    found = moments.of(work.number, e, matrix) if moments else None
    return found and MatrixMoments(found.blocks.to(torch.device(work.device)), found.tokens)


def _fallback(method: str, twin: Twin, matrix: str, moments: MatrixMoments | None) -> float:
    """The index in FALLBACKS of how the matrix is made."""
    if moments is None:
        return 2.0
    return float(method == "gptq" and not feeds_back(moments, twin.layout.format(matrix).group))
