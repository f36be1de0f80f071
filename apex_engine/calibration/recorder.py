"""Watches an exact pass, for the calibration: what the experts are given, and what their LOW twins make of it.

Letters: T tokens, K chosen experts a token or columns of a matrix, L MoE layers, E experts, B columns a block.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.checkpoint.moments import accumulate, block_size
from apex_engine.core.events import Handlers
from apex_engine.core.scorer import scores
from apex_engine.core.thresholds import BINS, Profile, bin_of
from apex_engine.core.vocabulary import ExpertId
from apex_engine.kernels.base import Views
from apex_engine.kernels.layout import MATRICES
from apex_engine.kernels.reference import expert_ffn, matrix_linear
from apex_engine.memory.pool import Pool
from apex_engine.memory.store import ExpertStore
from apex_engine.runtime.device import Applied, Job


class Recorder:
    """A sink that watches an exact pass: second moments of every expert's inputs, and how far its LOW twin's output is from its
    HIGH's.

    What is measured is weighted by the gate, as the outputs themselves are.
    """

    def __init__(self, folder: Path, manifest: Manifest, block: int) -> None:
        self._store = ExpertStore(folder, manifest)
        self.handlers: Handlers = {Applied: self._applied}
        self._lowest, self._highest = manifest.precisions[0], manifest.precisions[-1]
        self._buffer = Pool(manifest.layout(self._lowest), 1, torch.device("cpu")).memory[0]
        self._manifest = manifest
        layers, experts = len(manifest.layers), manifest.experts
        self.moments = [
            {m: torch.zeros(shape) for m, shape in self.shapes(manifest, block).items()} for _ in range(layers)
        ]
        self.tokens = np.zeros((layers, experts), np.int64)
        self.errors = np.zeros((layers, experts, 2))  # squared: of the LOW twin, of leaving the expert out
        self._sums = {name: np.zeros((layers, 1 + BINS)) for name in ("calls", "mass", "low_error", "skip_error")}
        self._seen = 0  # tokens, counted at the first layer
        self._step: tuple[Job, np.ndarray, np.ndarray] | None = None

    @staticmethod
    def shapes(manifest: Manifest, block: int) -> dict[str, tuple[int, ...]]:
        """Of one layer's moments, `[E, K / B, B, B]`."""
        low = manifest.layout(manifest.precisions[0])
        columns = {matrix: low.shape.matrix(matrix)[1] for matrix in MATRICES}
        sizes = {m: block_size(k, block, low.format(m).group) for m, k in columns.items()}
        return {
            matrix: (manifest.experts, k // sizes[matrix], sizes[matrix], sizes[matrix])
            for matrix, k in columns.items()
        }

    def _applied(self, event: Applied) -> None:
        job, use, views = event
        bins, mass = self._of_step(job)
        layer, expert = job.layer, use.expert
        choices = job.out.shape[1]
        x = job.x[torch.from_numpy(use.tokens).to(job.x.device)].float()
        gates = job.gates[torch.from_numpy(use.tokens * choices + use.choices).to(job.x.device)]
        high, low = (self._manifest.layout(precision) for precision in (self._highest, self._lowest))
        inner = job.activation.apply(matrix_linear(x, views, "up", high))
        exact = matrix_linear(inner, views, "down", high)
        other = expert_ffn(x, self._low_views(ExpertId(layer, expert), job.x.device), low, job.activation.apply)
        if job.activation.finish:
            exact, other = job.activation.finish(exact), job.activation.finish(other)
        for matrix, inputs in (("up", x), ("down", inner)):
            accumulate(self.moments[layer][matrix][expert], inputs.cpu(), gates.cpu())
        squares = [(gates.square() * part.square().sum(1)).double().cpu().numpy() for part in (exact - other, exact)]
        where = bins[use.tokens, use.choices]
        for name, values in (
            ("calls", np.ones(len(where))),
            ("mass", mass[use.tokens, use.choices]),
            ("low_error", squares[0]),
            ("skip_error", squares[1]),
        ):
            np.add.at(self._sums[name][layer], where, values)
        self.tokens[layer, expert] += len(where)
        self.errors[layer, expert] += [values.sum() for values in squares]

    def _of_step(self, job: Job) -> tuple[np.ndarray, np.ndarray]:
        """Bin of the score and share of the gate mass of each pair `[T, K]`: the same for all uses of a step."""
        if self._step is None or self._step[0] is not job:
            gates = job.gates.view(job.out.shape[:2]).cpu().numpy()
            magnitude = np.abs(gates).astype(np.float64)
            mass = magnitude / np.maximum(magnitude.sum(1, keepdims=True), np.finfo(np.float64).tiny)
            self._step = job, bin_of(scores(gates)), mass
            self._seen += len(gates) if job.layer == 0 else 0
        return self._step[1:]

    def _low_views(self, expert: ExpertId, device: torch.device) -> Views:
        self._store.read(expert, self._lowest, self._buffer.numpy())
        self._store.verify(expert, self._lowest, self._buffer.numpy())
        return self._manifest.layout(self._lowest).views(self._buffer.to(device))

    def profile(self) -> Profile:
        return Profile(**{name: sums / max(self._seen, 1) for name, sums in self._sums.items()})

    def tensors(self) -> dict[str, Tensor]:
        """As `write_moments` wants them."""
        found: dict[str, Tensor] = {}
        for entry, moments, tokens in zip(self._manifest.layers, self.moments, self.tokens, strict=True):
            found |= {f"{entry.number}.{matrix}": sums for matrix, sums in moments.items()}
            found[f"{entry.number}.tokens"] = torch.from_numpy(tokens.copy())
        return found

    def close(self) -> None:
        self._store.close()
