"""Compiles the Triton kernels for every format and GPU generation, on a machine with or without one.

    python -m apex_engine.kernels.triton.compile_matrix [--target 80 90] [--format int2 int8] [--json]

Each case is one kernel (GEMV; GEMM with the smallest and the largest tile), matrix ("up" with SwiGLU, "down" with gate weights),
format, dtype of x and target. Registers and spills are those that ptxas reports for the PTX, shared memory is what the launch
asks for. A spill, or shared memory above what a block of the target can have, fails the run with exit status 1.

Left out, to keep the whole within minutes: float16 inputs on targets that have bfloat16, whose code differs by a conversion; the
GEMM on sm_75, which takes the GEMV for everything; the GEMV of "down" with 16-bit inputs, which decode never has; biases, "up"
without SwiGLU and "down" without gate weights, which only add or take away a line of the epilogue.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from apex_engine.errors import ApexError
from apex_engine.kernels.triton.cases import FORMATS, SHARED, Case, Usage, cases


def main(args: argparse.Namespace) -> None:
    """`args` of `parse`. Raises ApexError in an interpreting process and where ptxas fails, SystemExit(1) for a case at fault."""
    from apex_engine.kernels.triton.compiler import compile_case
    from apex_engine.kernels.triton.launch import INTERPRETED

    if INTERPRETED:
        raise ApexError("TRITON_INTERPRET is set: unset it, the interpreter compiles nothing")
    results = {case: compile_case(case) for case in cases(args.target, args.format)}
    faults = report(results)
    if args.json:
        print(json.dumps([asdict(case) | asdict(usage) for case, usage in results.items()], indent=1))
    if faults:
        raise SystemExit(1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compile_matrix", description="Compile the Triton kernels for every GPU generation."
    )
    parser.add_argument(
        "--target", type=int, nargs="+", choices=SHARED, default=list(SHARED), help="compute capabilities"
    )
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats of the matrices")
    parser.add_argument("--json", action="store_true", help="every case on stdout, as JSON")
    return parser.parse_args(argv)


def report(results: dict[Case, Usage]) -> int:
    """Table on stderr: the worst of each target and kernel, and a line for every case at fault. Returns the number of those."""
    from rich.table import Table

    from apex_engine.cli.console import console

    table = Table(title=f"{len(results)} kernels compiled; the worst of each target and kernel")
    for column in ("target", "kernel", "cases", "registers", "spilled bytes", "shared KiB", "of"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for target, kernel in sorted({(case.target, case.kernel) for case in results}):
        found = [usage for case, usage in results.items() if (case.target, case.kernel) == (target, kernel)]
        shared = max(usage.shared for usage in found) / 1024
        worst = str(max(usage.registers for usage in found)), str(max(usage.spills for usage in found))
        table.add_row(f"sm_{target}", kernel, str(len(found)), *worst, f"{shared:.1f}", str(SHARED[target]))
    console.print(table)
    faults = [(case, fault) for case, usage in results.items() if (fault := usage.fault(case.target))]
    for case, fault in faults:
        console.print(f"sm_{case.target} {case.kernel} {case.format} {case.matrix} of {case.dtype} x: {fault}")
    return len(faults)


if __name__ == "__main__":
    arguments = parse()
    from apex_engine.cli.console import run  # after --help, which needs nothing

    run(lambda: main(arguments))
