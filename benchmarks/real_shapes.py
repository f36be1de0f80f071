"""Decoding over the experts of a real shape, read from the disk or from host memory, along a generated trace."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.cli.console import console
from apex_engine.config import Config
from apex_engine.eval.machine import machine
from apex_engine.memory.store import ExpertStore
from apex_engine.runtime.engine import Engine
from benchmarks.kernels import copy_bandwidth
from benchmarks.links import disk_rate
from benchmarks.runs import Run, record, summary
from benchmarks.steps import CALIBRATED, STEPS
from benchmarks.synthetic import SHAPES, Model, Trace, write_store


def synthetic(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Decode speed over the experts of a real shape on disk; every run begins with an empty cache and a warm-up."""
    shape = SHAPES[args.synthetic]
    start = time.perf_counter()
    write_store(folder, shape)
    device = torch.device(args.device)
    result: dict[str, Any] = {"machine": machine(device), "shape": args.synthetic, "memory": args.memory}
    result |= {"host_memory": args.host_memory, "write_seconds": time.perf_counter() - start}
    result["bytes_per_second"] = disk_rate(folder) if args.host_memory == "0" else 1e9 * copy_bandwidth(device, True)
    warm_up, total = 8, args.prompt + 8 + args.tokens
    result["lru"] = {
        rho: (Trace(shape, 512, 0).lru_hit_rate(int(rho * shape.chosen)), published)
        for rho, published in shape.published_lru.items()
    }
    runs = {name: Run() for name in args.steps if name != CALIBRATED}  # random experts have no KL
    for seed in track(range(args.repeats), "decoding", console=console):
        trace = Trace(shape, total, seed)
        for name, each in runs.items():
            kernels = "triton" if device.type == "cuda" else "auto"
            options = {"memory": args.memory, "host_memory": args.host_memory, "kernels": kernels, **STEPS[name]}
            # Checksums are compared once a blob: in the long run that takes no time, in this short one it would.
            store = ExpertStore(folder, Manifest.read(folder), check=False)
            engine = Engine.open(folder, Config.make(**options), store=store)
            model = Model(engine, shape, trace, device)
            begin = time.perf_counter()
            model.run(0, args.prompt, "prefill", new=True)
            each.first.append(time.perf_counter() - begin)
            for token in range(args.prompt, args.prompt + warm_up):
                model.run(token, 1, "decode", new=False)
            engine.reset_stats()
            begin = time.perf_counter()
            for token in range(args.prompt + warm_up, total):
                model.run(token, 1, "decode", new=False)
            record(engine, time.perf_counter() - begin, args.tokens, each)
            engine.close()
    result["runs"] = {name: summary(each, result["bytes_per_second"]) for name, each in runs.items()}
    return result
