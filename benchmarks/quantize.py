"""python -m benchmarks.quantize: how fast LOW twins are made, and how good they are, by method, in docs/quantize.md's table.

One expert matrix of each width, of normal weights; inputs near a plane, as those of real layers are, so that their second moments
have something to say. Methods in turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from apex_engine.checkpoint.moments import MatrixMoments, accumulate, block_size, damp
from apex_engine.cli.console import run
from apex_engine.eval.machine import machine
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat, dequantize
from apex_engine.memory.probe import parse_device
from apex_engine.quantize.methods.encode import encode

SHAPES = {
    "Mixtral up": (1024, 4096),
    "OLMoE up": (2048, 2048),
    "bundled model's up": (768, 192),
}  # (N, K); of Mixtral's a part
BLOCK, GROUP = 512, 64
# name -> method, whether the second moments are given
METHODS = {
    "hqq": ("hqq", False),
    "clip": ("clip", False),
    "clip, importance": ("clip", True),
    "gptq, importance": ("gptq", True),
}


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.quantize", description=__doc__)
    p.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME", help="default: all")
    p.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    p.add_argument("--device", default="cpu", help="default: %(default)s")
    args = p.parse_args(arguments)
    device = parse_device(args.device)
    print(
        "| matrix | method | million weights/s | of hqq | weight error | output error |\n|---|---|---:|---:|---:|---:|"
    )
    for name in args.shapes:
        rows, columns = SHAPES[name]
        torch.manual_seed(0)
        weight = torch.randn(rows, columns, device=device) * 0.02
        x, moments = inputs(columns, device)
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        fields: dict[str, dict[str, Tensor]] = {}
        for turn in range(args.repeats + 1):
            for method, (way, given) in METHODS.items():
                start = time.perf_counter()
                fields[method] = encode(weight, MatrixFormat("int2", GROUP), way, moments if given else None)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if turn:  # the first warms up
                    seconds[method].append(time.perf_counter() - start)
        for method, times in seconds.items():
            rate = weight.numel() / statistics.median(times) / 1e6
            ratio = statistics.median(a / b for a, b in zip(seconds["hqq"], times, strict=True))
            missed = decoded(fields[method], rows, columns) - weight
            errors = missed.norm() / weight.norm(), (x @ missed.T).norm() / (x @ weight.T).norm()
            print(f"| {name} | {method} | {rate:.2f} | {ratio:.2f} | {errors[0]:.3f} | {errors[1]:.3f} |", flush=True)
    print(f"\nMachine: {machine(device)}.")


def inputs(columns: int, device: torch.device) -> tuple[Tensor, MatrixMoments]:
    """Tokens `[T, K]`, and their second moments."""
    count, rank = 4 * columns, columns // 4
    x = torch.randn(count, rank, device=device) @ torch.randn(rank, columns, device=device) / rank**0.5
    x += 0.3 * torch.randn(count, columns, device=device)
    size = block_size(columns, BLOCK, GROUP)
    sums = torch.zeros(columns // size, size, size, device=device)
    accumulate(sums, x, torch.ones(count, device=device))
    return x, MatrixMoments(damp(sums), count)


def decoded(fields: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    """`[N, K]` that the fields stand for."""
    layout = Layout(ExpertShape(columns, rows, False), MatrixFormat("int2", GROUP), MatrixFormat("int8"))
    return dequantize({f"up.{name}": value for name, value in fields.items()}, "up", layout)


if __name__ == "__main__":
    run(main)
