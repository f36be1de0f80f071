"""Compiles the kernels of gpu.py for every format and GPU generation, on a machine with or without one.

    python -m apex_engine.kernels.triton.compile_matrix [--target 80 90] [--format int2 int8] [--json]

Each case is one kernel (GEMV; GEMM with the smallest and the largest tile), matrix ("up" with SwiGLU, "down" with gate weights),
format, dtype of x and target. Registers and spills are those that ptxas reports for the PTX, shared memory is what the launch
asks for. A spill, or shared memory above what a block of the target can have, fails the run with exit status 1.

Left out, to keep the whole within minutes: float16 inputs on targets that have bfloat16, whose code differs by a conversion; the
GEMM on sm_75, which takes the GEMV for everything; the GEMV of "down" with 16-bit inputs, which decode never has; biases, "up"
without SwiGLU and "down" without gate weights, which only add or take away a line of the epilogue.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from apex_engine.cli.console import console, run
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import MATRICES, ExpertShape, Layout, MatrixFormat
from apex_engine.kernels.triton.gpu import INTERPRETED, Launch, launch

# Compute capability -> KiB of shared memory a block can have.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
FORMATS = {
    "int2": MatrixFormat("int2", 64),
    "int2-g16": MatrixFormat("int2", 16),
    "int3": MatrixFormat("int3", 64),
    "int4": MatrixFormat("int4", 64),
    "int8": MatrixFormat("int8"),
    "bfloat16": MatrixFormat("bfloat16"),
    "float16": MatrixFormat("float16"),
}
SHAPE = ExpertShape(2048, 768, True)  # that of Qwen3-30B-A3B
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True)
class Case:
    """One compilation. `tokens` of a tile: 1 is the GEMV."""

    target: int
    format: str
    matrix: str
    tokens: int
    dtype: str

    @property
    def kernel(self) -> str:
        return "gemv" if self.tokens == 1 else f"gemm-{self.tokens}"


@dataclass(frozen=True)
class Usage:
    """What a compiled case needs of a GPU: registers a thread, bytes of spills a thread, bytes of shared memory a block."""

    registers: int
    spills: int
    shared: int
    seconds: float

    def fault(self, target: int) -> str:
        """Why it fails the run; "" where it does not."""
        if self.spills:
            return f"spills {self.spills} bytes"
        if self.shared > SHARED[target] * 1024:
            return f"needs {self.shared} bytes of shared memory of {SHARED[target] * 1024}"
        return ""


def cases(targets: list[int], formats: list[str]) -> Iterator[Case]:
    """All cases of these targets and formats, without those the module's text leaves out."""
    for target in targets:
        dtypes = ("float32", "bfloat16" if target >= 80 else "float16")
        for form in formats:
            yield from (Case(target, form, "up", 1, dtype) for dtype in dtypes)
            yield Case(target, form, "down", 1, "float32")
            if target >= 80:
                yield from (Case(target, form, *rest) for rest in product(MATRICES, (16, 64), dtypes))


def compile_case(case: Case) -> Usage:
    """Compile one case, or take it from Triton's cache. Raises ApexError where ptxas refuses it."""
    start = time.perf_counter()
    form = FORMATS[case.format]
    dtype: torch.dtype = getattr(torch, case.dtype)
    plan = launch(Layout(SHAPE, form, form), case.matrix, dtype, case.tokens)
    compiled = triton.compile(
        source(plan, dtype, case),
        target=GPUTarget("cuda", case.target, 32),
        options=plan.options,
    )
    registers, spills = ptxas(compiled.asm["ptx"], case.target)
    return Usage(registers, spills, compiled.metadata.shared, round(time.perf_counter() - start, 2))


def source(plan: Launch, dtype: torch.dtype, case: Case) -> ASTSource:
    """The kernel with the argument types and alignments of a real launch."""
    between = POINTERS[torch.float32 if case.tokens == 1 else dtype]
    signature: dict[str, str] = dict.fromkeys(plan.kernel.arg_names, "constexpr")
    signature |= {
        "x": POINTERS[dtype],
        "memory": "*u8",
        "stride": "i32",
        "meta": "*i64",
        "tiles": "i32",
        "pairs": "i32",
    }
    signature |= {"gates": "*fp32", "y": between if case.matrix == "up" else "*fp32"}
    aligned = ("x", "memory", "stride", "meta", "gates", "y")
    attributes: Any = {(plan.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(plan.kernel, signature, plan.constants, attributes)


def ptxas(ptx: str, target: int) -> tuple[int, int]:
    """(registers, bytes of spill stores and loads) of the one kernel in `ptx`."""
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if not arch:
        raise ApexError(f"the PTX for sm_{target} names no target")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            get_ptxas(target).path,
            "-v",
            f"--gpu-name={arch[1]}",
            str(path),
            "-o",
            str(path.with_suffix(".cubin")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    used = re.search(r"Used (\d+) registers", report)
    if done.returncode or not used:
        raise ApexError(f"ptxas fails for sm_{target}: {report.strip()[-500:]}")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return int(used[1]), sum(map(int, spills))


def report(results: dict[Case, Usage]) -> None:
    """Table on stderr: the worst of each target and kernel, and a line for every case at fault."""
    table = Table(title=f"{len(results)} kernels compiled; the worst of each target and kernel")
    for column in ("target", "kernel", "cases", "registers", "spilled bytes", "shared KiB", "of"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for target, kernel in sorted({(case.target, case.kernel) for case in results}):
        found = [usage for case, usage in results.items() if (case.target, case.kernel) == (target, kernel)]
        shared = max(usage.shared for usage in found) / 1024
        worst = str(max(usage.registers for usage in found)), str(max(usage.spills for usage in found))
        table.add_row(f"sm_{target}", kernel, str(len(found)), *worst, f"{shared:.1f}", str(SHARED[target]))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="compile_matrix", description="Compile the Triton kernels for every GPU generation."
    )
    parser.add_argument(
        "--target", type=int, nargs="+", choices=SHARED, default=list(SHARED), help="compute capabilities"
    )
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats of the matrices")
    parser.add_argument("--json", action="store_true", help="every case on stdout, as JSON")
    args = parser.parse_args()
    if INTERPRETED:
        raise ApexError("TRITON_INTERPRET is set: unset it, the interpreter compiles nothing")
    results = {case: compile_case(case) for case in cases(args.target, args.format)}
    report(results)
    if args.json:
        print(json.dumps([asdict(case) | asdict(usage) for case, usage in results.items()], indent=1))
    faults = {case: usage.fault(case.target) for case, usage in results.items()}
    for case, fault in faults.items():
        if fault:
            console.print(f"sm_{case.target} {case.kernel} {case.format} {case.matrix} of {case.dtype} x: {fault}")
    if any(faults.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
