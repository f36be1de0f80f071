"""python -m benchmarks.kernels: time of one expert in every kernel, format and shape, beside torch on 16-bit weights."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track

from apex_engine.cli.console import console, run
from apex_engine.errors import ApexError
from apex_engine.eval.machine import machine
from apex_engine.kernels.base import Activation, Kernel, Routed, swiglu
from apex_engine.kernels.layout import RAW, ExpertShape, Layout, MatrixFormat
from apex_engine.kernels.reference import Reference
from apex_engine.kernels.registry import KERNELS, pick
from apex_engine.quantize.blob import make_blob

SHAPES = {  # (intermediate, hidden)
    "mixtral": (14336, 4096),
    "phi-moe": (6400, 4096),
    "deepseek-v2-lite": (1408, 2048),
    "qwen3-30b": (768, 2048),
    "olmoe": (1024, 2048),
    "demo": (384, 192),
}
TOKENS = (1, 4, 16, 128)
FORMATS = ("float16", "bfloat16", "int8", "int2")
WORKING_SET = 300 << 20  # bytes of slots gone through in turns: more than the caches hold
TURNS, SECONDS = 15, 0.03  # of each kernel, and how long one takes: at least a call
LEAST_TURNS = 3  # of a kernel whose calls take longer than a turn
SWIGLU = Activation(swiglu, swiglu=True)


class Size(NamedTuple):
    """Of a run: turns of each kernel, bytes of its slots."""

    turns: int = TURNS
    slots: int = WORKING_SET


WHOLE = Size()


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    p.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME", help="default: all")
    p.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T", help="default: 1 4 16 128")
    p.add_argument("--kernels", nargs="+", choices=KERNELS, help="default: all this machine has")
    p.add_argument("--device", default="cpu", help="default: %(default)s")
    p.add_argument("--turns", type=int, default=TURNS, help="of each kernel; default: %(default)s")
    p.add_argument(
        "--slots", type=int, default=WORKING_SET >> 20, metavar="MB", help="gone through in turns; default: %(default)s"
    )
    p.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    args = p.parse_args(arguments)
    size = Size(args.turns, args.slots << 20)
    result = benchmark(args.shapes, args.tokens, args.kernels or KERNELS[1:], torch.device(args.device), size)
    print(json.dumps(result, indent=1) if args.json else markdown(result))


def benchmark(
    shapes: list[str], tokens: list[int], names: Sequence[str], device: torch.device, size: Size = WHOLE
) -> dict[str, Any]:
    """Times in milliseconds, the kernels of a shape in turns, so that a slow spell of the machine is everyone's; a ratio is the
    median of those of the turns. Every kernel is checked against the reference first; raises ApexError where one is wrong."""
    rows = []
    for shape in track(shapes, "timing", console=console):
        entries = list(_entries(shape, names, device, size.slots))
        for t in tokens:
            some = [entry for entry in entries if t <= entry[-1]]
            turns: dict[tuple[str, str], list[float]] = {}
            for turn in range(size.turns):
                for layout, kernel, memory, _ in some:
                    times = turns.setdefault((layout.up.name, kernel.name), [])
                    if turn < LEAST_TURNS or times[-1] < 1e3 * SECONDS:
                        times.append(timed(kernel, layout, memory, t))
            for (form, name), times in turns.items():
                layout, milliseconds = _layout(shape, form), statistics.median(times)
                row = {"shape": shape, "format": form, "kernel": name, "tokens": t, "ms": milliseconds}
                row["gb_s"] = sum(field.nbytes for field in layout.fields) / milliseconds / 1e6
                row["fp16_gb_s"] = 2 * layout.shape.weights / milliseconds / 1e6
                for base in RAW:
                    if (base, "torch") in turns:
                        ratios = [a / b for a, b in zip(times, turns[base, "torch"], strict=False)]
                        row[f"x_{base}"] = statistics.median(ratios)
                rows.append(row)
        del entries
    rows.sort(key=lambda row: (shapes.index(row["shape"]), FORMATS.index(row["format"])))
    return {"machine": machine(device), "copy_gb_s": copy_bandwidth(device, nbytes=size.slots), "rows": rows}


def _entries(
    shape: str, names: Sequence[str], device: torch.device, nbytes: int
) -> Iterator[tuple[Layout, Kernel, torch.Tensor, float]]:
    """Kernels of this machine, their slots, and the most tokens they are timed with."""
    for form in FORMATS:
        layout = _layout(shape, form)
        memory = _pool(layout, device, nbytes)
        wanted, seen = [(name, False) for name in names], set[str]()
        if "native" in names and form in RAW and device.type == "cpu":
            wanted.append(("auto", True))  # what `exact` takes
        for name, bit_equal in wanted:
            try:
                kernel = pick(name, layout, memory, bit_equal)
            except ApexError:
                continue  # not on this machine
            if kernel.name == "torch" and name != "torch":
                continue  # this kernel leaves the format to torch
            if kernel.name in seen:
                continue  # "auto" is one of the others
            seen.add(kernel.name)
            if bit_equal:
                memory[0] = memory[1]  # where it was tried
            check(kernel, layout, memory)
            slow = name == "torch" and form in ("int2", "int8") and device.type == "cpu"  # seconds a call
            most = 1 if bit_equal else 16 if slow else math.inf  # bit-equal, more tokens are torch's
            yield layout, kernel, memory, most


def _layout(shape: str, form: str) -> Layout:
    intermediate, hidden = SHAPES[shape]
    return Layout(ExpertShape(hidden, intermediate, True), *(2 * [MatrixFormat(form, 64 if form == "int2" else 0)]))


def check(kernel: Kernel, layout: Layout, memory: torch.Tensor) -> None:
    """One token and three against the reference, inputs rounded where the kernel rounds them."""
    rounded = memory.device.type == "cpu" and kernel.name != "torch"
    reference = Reference(layout, memory[:2], round_inputs=rounded)
    for tokens in (1, 3):
        x = torch.randn(tokens, layout.shape.hidden, device=memory.device).to(RAW.get(layout.up.name, torch.float32))
        gates, pairs = torch.ones(tokens, device=memory.device), np.arange(tokens)
        routed = Routed(np.array([0, tokens]), pairs, pairs)
        found, expected = torch.zeros(2, tokens, layout.shape.hidden, device=memory.device)
        kernel(x, [1], routed, gates, SWIGLU, found)
        reference(x, [1], routed, gates, SWIGLU, expected)
        error = ((found - expected).norm() / expected.norm()).item()
        if not error <= 2e-3:
            raise ApexError(
                f"{kernel.name} is wrong for {layout.up.name} ({error:.1e} from the reference): nothing is measured"
            )


def timed(kernel: Kernel, layout: Layout, memory: torch.Tensor, tokens: int) -> float:
    """Milliseconds of the median call of one turn."""
    dtype = RAW.get(layout.up.name, torch.bfloat16)
    x = torch.randn(tokens, layout.shape.hidden, device=memory.device).to(dtype)
    gates = torch.ones(tokens, device=memory.device)
    out = torch.zeros(tokens, layout.shape.hidden, device=memory.device)
    pairs = np.arange(tokens)
    routed, turn = Routed(np.array([0, tokens]), pairs, pairs), [0]

    def call() -> None:
        turn[0] = (turn[0] + 1) % len(memory)
        kernel(x, [turn[0]], routed, gates, SWIGLU, out)

    return _median(call, memory.device)


def copy_bandwidth(device: torch.device, from_host: bool = False, nbytes: int = WORKING_SET) -> float:
    """GB/s of bytes read by a large copy within the device, or to it from host memory, pinned for CUDA."""
    pinned = from_host and device.type == "cuda"
    source = torch.ones(nbytes, dtype=torch.uint8, device="cpu" if from_host else device, pin_memory=pinned)
    target = torch.empty_like(source, device=device)
    return nbytes / _median(lambda: target.copy_(source), device) / 1e6


def _pool(layout: Layout, device: torch.device, nbytes: int) -> torch.Tensor:
    expert = {f"{m}.weight": torch.randn(layout.shape.matrix(m)) * 0.02 for m in ("up", "down")}
    blob, _ = make_blob(expert, layout, "clip")
    return blob.to(device).repeat(max(2, nbytes // layout.stride), 1)


def _median(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of the median call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()
    times: list[float] = []
    wait()
    while not times or sum(times) < SECONDS:
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def markdown(result: dict[str, Any]) -> str:
    """One table a shape: milliseconds, and the ratio to torch on float16 and bfloat16 weights."""
    lines = [f"Machine: {result['machine']}; a large copy reads {result['copy_gb_s']:.1f} GB/s.", ""]
    for shape in dict.fromkeys(row["shape"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["shape"] == shape]
        lines += [
            f"### {shape} ({SHAPES[shape][0]} x {SHAPES[shape][1]})",
            "",
            "| format | kernel | tokens | ms | GB/s read | of the copy | GB/s as 16-bit | x fp16 time | x bf16 time |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in rows:
            cells = [
                row["format"],
                row["kernel"],
                str(row["tokens"]),
                f"{row['ms']:.3f}",
                f"{row['gb_s']:.1f}",
                f"{row['gb_s'] / result['copy_gb_s']:.0%}",
                f"{row['fp16_gb_s']:.0f}",
                *(f"{row[ratio]:.2f}" if ratio in row else "-" for ratio in ("x_float16", "x_bfloat16")),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
