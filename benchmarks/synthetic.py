"""Models of real shape without real weights: a twin store of random experts, and routing replayed from a generated trace.

The trace has the published statistics of the model's routing (hit rates of LRU and LFU at a number of slots for each layer); a
layer's choice keeps each expert of the previous token with probability `stay`, else takes one of the last tokens' with
probability `recent`, else one by a Zipf popularity. Each expert of the next layer is foreseen with probability `foreseen`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor
from torch.nn.functional import linear

from apex_engine.checkpoint.expert_file import expert_file, expert_file_name
from apex_engine.checkpoint.manifest import LayerEntry, Manifest, Twin
from apex_engine.cli.console import console
from apex_engine.core.prefetch import Choice
from apex_engine.kernels.base import Activation, swiglu
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat
from apex_engine.quantize.blob import make_blob

SWIGLU = Activation(swiglu, swiglu=True)


@dataclass(frozen=True)
class Shape:
    layers: int
    experts: int
    chosen: int
    hidden: int
    intermediate: int
    stay: float
    recent: float
    zipf: float
    foreseen: float  # Mixtral: 87 % of whole sets (MoE-APEX)
    published_lru: dict[float, float]  # hit rate by slots a layer / chosen


SHAPES = {
    "olmoe": Shape(16, 64, 8, 2048, 1024, 0.28, 0.2, 0.9, 0.87, {1: 0.428, 2: 0.612, 4: 0.828}),
    "demo": Shape(8, 8, 2, 192, 384, 0.15, 0.2, 0.3, 0.87, {}),
    "mixtral": Shape(4, 8, 2, 4096, 14336, 0.15, 0.2, 0.3, 0.93, {1: 0.363, 2: 0.616, 3: 0.829}),
}


def write_store(folder: Path, shape: Shape) -> Manifest:
    """All experts have the same random weights (scale .02): the disk does not know."""
    torch.manual_seed(0)
    expert_shape = ExpertShape(shape.hidden, shape.intermediate, True)
    high = Layout(expert_shape, MatrixFormat("bfloat16"), MatrixFormat("bfloat16"))
    low = Layout(expert_shape, MatrixFormat("int2", 64), MatrixFormat("int2", 64))
    weights = {f"{m}.weight": torch.randn(expert_shape.matrix(m)) * 0.02 for m in ("up", "down")}
    files, layers = {}, []
    blobs = {form: make_blob(weights, layout, "clip")[0] for form, layout in (("bfloat16", high), ("int2", low))}
    for number in track(range(shape.layers), "writing the experts", console=console, transient=True):
        names = {}
        for form, layout in (("bfloat16", high), ("int2", low)):
            names[form] = expert_file_name(number, form)
            with expert_file(folder / names[form], layout, shape.experts) as file:
                for _ in range(shape.experts):
                    file.append(blobs[form])
            files[names[form]] = file.entry()
        layers.append(LayerEntry(number, f"model.layers.{number}.mlp.experts", (names["int2"], names["bfloat16"])))
    twins = (Twin("int2", low), Twin("bfloat16", high))
    manifest = Manifest("synthetic", "", asdict(shape), shape.experts, twins, tuple(layers), 0, files)
    manifest.write(folder)
    return manifest


class Trace:
    """Choice and gate weights of every token and layer, and what a predictor would have foreseen."""

    def __init__(self, shape: Shape, tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        t, n, k = tokens, shape.layers, shape.chosen
        self.chosen = np.stack([_layer(shape, t, rng) for _ in range(n)], 1)  # [T, L, K]
        gates = np.exp(rng.normal(0, 1, (t, n, k)))
        self.gates = np.sort(gates / gates.sum(-1, keepdims=True))[..., ::-1].astype(np.float32)
        guess = rng.integers(0, shape.experts, (t, n, k))
        self.expected = np.where(rng.random((t, n, k)) < shape.foreseen, self.chosen, guess)

    def lru_hit_rate(self, slots: int) -> float:
        """With so many slots for each layer."""
        hits = 0
        for layer in range(self.chosen.shape[1]):
            resident: OrderedDict[int, None] = OrderedDict()
            for row in self.chosen[:, layer].tolist():
                for expert in row:
                    hits += expert in resident
                    resident.pop(expert, None)
                    resident[expert] = None
                while len(resident) > slots:
                    resident.popitem(last=False)
        return hits / self.chosen.size


def _layer(shape: Shape, tokens: int, rng: np.random.Generator) -> NDArray[np.int64]:
    popularity = rng.permutation(1 / np.arange(1, shape.experts + 1) ** shape.zipf)
    popularity /= popularity.sum()
    rows = [rng.choice(shape.experts, shape.chosen, replace=False, p=popularity)]
    while len(rows) < tokens:
        row = [e for e in rows[-1].tolist() if rng.random() < shape.stay]
        while len(row) < shape.chosen:
            if rng.random() < shape.recent and len(rows) > 1:
                expert = int(rows[-1 - rng.integers(1, min(6, len(rows)))][rng.integers(shape.chosen)])
            else:
                expert = int(rng.choice(shape.experts, p=popularity))
            if expert not in row:
                row.append(expert)
        rows.append(rng.permutation(row))
    return np.stack(rows)


class Model:
    """Goes through a trace with an engine: for each layer, four dense products in place of attention, then the experts."""

    def __init__(self, engine: Any, shape: Shape, trace: Trace, device: torch.device) -> None:
        self.engine, self._shape, self._trace, self._device = engine, shape, trace, device
        self._dense = [torch.randn(shape.hidden, shape.hidden, dtype=torch.bfloat16, device=device) for _ in range(4)]
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._token = 0
        engine.predictor = self
        engine.prepare(device, self._dtype)

    ready, unknown, reads_embeddings = True, (), False  # of a predictor

    def predict(self, now: int, later: int, x: Tensor) -> Choice:
        some = slice(self._token, self._token + len(x))
        return Choice(self._trace.gates[some, later], self._trace.expected[some, later])

    def observe(self, layer: int, x: Tensor) -> None:
        pass

    def learn(self) -> None:
        pass

    def run(self, start: int, tokens: int, phase: str, new: bool) -> None:
        """One pass."""
        self._token, begun = start, time.perf_counter()
        x = torch.randn(tokens, self._shape.hidden, device=self._device, dtype=self._dtype)
        self.engine.begin_pass(phase, tokens, new)
        for layer in range(self._shape.layers):
            for weight in self._dense:
                linear(x.bfloat16(), weight)
            chosen = torch.from_numpy(self._trace.chosen[start : start + tokens, layer]).to(self._device)
            gates = torch.from_numpy(self._trace.gates[start : start + tokens, layer]).to(self._device)
            self.engine.step(layer, x, chosen, gates, SWIGLU)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.engine.end_pass(phase, tokens, time.perf_counter() - begun)
