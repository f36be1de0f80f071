"""python -m benchmarks.gpu_check: kernels, main job and decoding of real shape on a CUDA device, into one JSON file.

Needs torch, triton, transformers, safetensors and numpy; takes a few minutes. Exits with 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import apex_engine
from apex_engine.cli.console import quieten, run, say
from apex_engine.errors import ApexError
from apex_engine.eval.machine import machine
from apex_engine.kernels.base import Routed
from apex_engine.kernels.layout import RAW, ExpertShape, Layout, MatrixFormat
from apex_engine.kernels.reference import Reference
from apex_engine.kernels.registry import pick
from apex_engine.quantize.blob import make_blob
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import resolve
from benchmarks import decode
from benchmarks.kernels import SWIGLU, WHOLE, Size, benchmark

FORMATS = [("int2", 64), ("int2", 16), ("int3", 64), ("int4", 64), ("int8", 0), ("bfloat16", 0), ("float16", 0)]
SHAPES = [(192, 384), (64, 96), (640, 768), (1408, 160)]  # (hidden, intermediate)


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    p.add_argument("--device", default="cuda", help="default: %(default)s; cpu tries the script itself")
    p.add_argument(
        "--shapes", nargs="+", default=["mixtral", "olmoe", "demo"], help="of the benchmark; default: %(default)s"
    )
    p.add_argument("--synthetic", default="mixtral", choices=decode.SHAPES, help="to decode; default: %(default)s")
    p.add_argument("--model", default="tiny", help="for the main job; default: the bundled model")
    p.add_argument(
        "--small", action="store_true", help="a few tokens and turns of each: tries the script, measures nothing"
    )
    p.add_argument("-o", "--output", type=Path, help="write the JSON there instead of to stdout")
    args = p.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ApexError("torch sees no CUDA device here: run it on a machine that has one")
    quieten()
    start = time.perf_counter()
    result: dict[str, Any] = {"machine": machine(device), "device": args.device}
    if device.type == "cuda":
        result["capability"] = list(torch.cuda.get_device_capability())
        result["cuda"] = torch.version.cuda
        result["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    size = Size(turns=1, slots=8 << 20) if args.small else WHOLE
    tokens = [1] if args.small else [1, 4, 16, 128]
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "numerics": lambda: numerics(device, SHAPES[:2] if args.small else SHAPES),
        "main_job": lambda: main_job(device, args.model, 8 if args.small else 64),
        "benchmark": lambda: benchmark(args.shapes, tokens, ("torch", "triton", "native"), device, size),
        "decode": lambda: decoding(args.synthetic, args.device, *((1, 4) if args.small else (2, 32))),
    }
    for name, job in jobs.items():
        say(f"{name} ...")
        result[name] = job()
    result["seconds"] = round(time.perf_counter() - start, 1)
    result["passed"] = not result["numerics"]["failed"] and result["main_job"]["exact_equals_transformers"]
    text = json.dumps(result, indent=1) + "\n"
    if args.output:
        args.output.write_text(text)
        say(f"written to {args.output}")
    else:
        print(text)
    if not result["passed"]:
        say("FAILED: see numerics.failed and main_job")
        sys.exit(1)


def numerics(device: torch.device, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """Every format and shape against the reference on the device: worst relative RMS error by dtype of the inputs."""
    torch.manual_seed(0)
    worst: dict[str, float] = {}
    failed = []
    limits = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}
    for hidden, intermediate in shapes:
        for form, group in FORMATS:
            if group and (hidden % group or intermediate % group):
                continue
            layout = Layout(
                ExpertShape(hidden, intermediate, True), MatrixFormat(form, group), MatrixFormat(form, group)
            )
            memory = torch.full((3, layout.stride), 0xFF, dtype=torch.uint8)
            for slot in (0, 2):
                expert = {f"{m}.weight": torch.randn(layout.shape.matrix(m)) * 0.02 for m in ("up", "down")}
                memory[slot] = make_blob(expert, layout, "clip")[0]
            memory = memory.to(device)
            kernel = pick("triton" if device.type == "cuda" else "auto", layout, memory)
            for dtype, limit in limits.items():
                if form in RAW and dtype not in (RAW[form], torch.float32):
                    continue  # a twin in one 16-bit type is not computed in the other
                rounded = device.type == "cpu" and group > 0  # the CPU kernels round their inputs: not this comparison
                for tokens in (1, 5, 16, 33):
                    error = _error(kernel, layout, memory, dtype, tokens)
                    key = str(dtype).removeprefix("torch.")
                    worst[key] = max(worst.get(key, 0.0), error)
                    if not error <= limit and not rounded:
                        case = {"format": form, "group": group, "shape": [hidden, intermediate], "dtype": key}
                        failed.append({**case, "tokens": tokens, "error": error})
    return {
        "worst_rms": worst,
        "limits": {str(k).removeprefix("torch."): v for k, v in limits.items()},
        "failed": failed,
    }


def _error(kernel: Any, layout: Layout, memory: torch.Tensor, dtype: torch.dtype, tokens: int) -> float:
    """Two experts, each token to both; against the reference in float32 on the same inputs."""
    device, hidden = memory.device, layout.shape.hidden
    x, gates = torch.randn(tokens, hidden, device=device).to(dtype), torch.rand(2 * tokens, device=device)
    each = np.arange(tokens)
    routed = Routed(np.array([0, tokens, 2 * tokens]), np.tile(each, 2), np.concatenate([2 * each, 2 * each + 1]))
    found, expected = (torch.full((2 * tokens, hidden), float("nan"), device=device) for _ in range(2))
    kernel(x, [2, 0], routed, gates, SWIGLU, found)
    Reference(layout, memory)(x.float(), [2, 0], routed, gates, SWIGLU, expected)
    return ((found - expected).norm() / expected.norm()).item()


def main_job(device: torch.device, name: str, new: int) -> dict[str, Any]:
    """The model `name`: `new` tokens of exact mode beside transformers', and twice as many of adaptive mode at 25 %."""
    source = resolve(name)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer("And it came to pass", return_tensors="pt").input_ids.to(device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "apex"
        convert(name, Source(source), folder, Options(), lambda n: None)
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device)
        exact = apex_engine.load(folder, dtype=torch.float32, device=device, mode="exact", memory="25%")
        generated = [m.generate(ids, max_new_tokens=new, do_sample=False) for m in (reference, exact)]
        logits = [m(ids).logits for m in (reference, exact)]
        kernels = "triton" if device.type == "cuda" else "auto"
        adaptive = apex_engine.load(folder, device=device, memory="25%", kernels=kernels)
        adaptive.generate(ids, max_new_tokens=8, do_sample=False)
        adaptive.apex.reset_stats()
        adaptive.generate(ids, max_new_tokens=2 * new, do_sample=False)
        return {
            "exact_equals_transformers": bool(torch.equal(*generated)),
            "largest_logit_difference": (logits[0] - logits[1]).abs().max().item(),
            "adaptive": adaptive.apex.stats(),
        }


def decoding(shape: str, device: str, repeats: int, tokens: int) -> dict[str, Any]:
    """Random experts of real shape behind the real link: all of them in host memory, a quarter of the bytes on the device."""
    steps = ["on-demand", "+ dynamic precision", "+ prefetch", "+ admission = default", "apex"]
    options = ["--synthetic", shape, "--device", device, "--host-memory", "100%", "--prompt", "16"]
    options += ["--repeats", str(repeats), "--tokens", str(tokens)]
    with tempfile.TemporaryDirectory() as scratch:
        return decode.synthetic(Path(scratch), decode.parse([*options, "--steps", *steps]))


if __name__ == "__main__":
    run(main)
