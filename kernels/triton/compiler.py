"""One kernel compiled for a GPU that need not be there, and what ptxas says of it."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from apex_engine.errors import ApexError
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat
from apex_engine.kernels.triton.cases import FORMATS, Case, Usage
from apex_engine.kernels.triton.launch import Launch, launch

SHAPE = ExpertShape(2048, 768, True)  # that of Qwen3-30B-A3B
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def compile_case(case: Case) -> Usage:
    """Compile one case, or take it from Triton's cache. Raises ApexError where ptxas refuses it."""
    start = time.perf_counter()
    form = MatrixFormat(*FORMATS[case.format])
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
