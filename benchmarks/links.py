"""How fast what brings the experts is: the link that is simulated, and the disk."""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.core.vocabulary import ExpertId
from apex_engine.kernels.layout import ALIGN
from apex_engine.memory.loader import WORKERS
from apex_engine.memory.requests import BLOCK
from apex_engine.memory.store import ExpertStore
from benchmarks.runs import Run, load, one_text


def find_link(folder: Path, texts: Tensor, args: argparse.Namespace) -> dict[str, float]:
    """The link at which loading takes the share asked for of on-demand's time.

    Bytes are the same from wherever they come, and the time that is waited for them is taken off: they come from the disk.
    """
    model = load(folder, args, system="on-demand")
    run = Run()
    for row in texts:
        one_text(model, row, None, args.prompt, run)
    model.apex.close()
    compute = statistics.median(d - s for d, s in zip(run.decode, run.stall, strict=True))
    nbytes = statistics.median(run.nbytes)
    rate = nbytes / (compute * args.loading / (1 - args.loading))
    return {"bytes_per_second": rate, "compute_seconds": compute, "bytes": nbytes}


def disk_rate(folder: Path) -> float:
    """Bytes a second of reading the highest twins past the page cache, in blocks, as many at a time as the loader has workers."""
    manifest = Manifest.read(folder)
    store = ExpertStore(folder, manifest)
    best = manifest.precisions[-1]
    stride = manifest.strides[best]
    some = [ExpertId(layer, e) for layer in range(len(manifest.layers)) for e in range(min(8, manifest.experts))]
    raw = torch.empty(WORKERS, stride + ALIGN, dtype=torch.uint8)

    def read(block: tuple[int, int]) -> int:
        expert, start = some[block[0]], block[1]
        part = raw[block[0] % WORKERS]
        part = part[-part.data_ptr() % ALIGN :][start : min(start + BLOCK, stride)]
        store.read(expert, best, part.numpy(), start)
        return len(part)

    with ThreadPoolExecutor(WORKERS) as pool:
        begin = time.perf_counter()
        done = sum(pool.map(read, [(i, start) for i in range(len(some)) for start in range(0, stride, BLOCK)]))
        rate = done / (time.perf_counter() - begin)
    return rate
