"""python -m apex_engine.quantize SOURCE -o FOLDER: write the HIGH and LOW twin of every routed expert."""

from __future__ import annotations

import argparse
from pathlib import Path

from apex_engine.checkpoint.manifest import verify
from apex_engine.checkpoint.moments import Moments
from apex_engine.cli.console import run, say
from apex_engine.cli.quantizing import quantize
from apex_engine.kernels.packing import GROUP_SIZES
from apex_engine.memory.probe import parse_device
from apex_engine.quantize.convert import HIGH_FORMATS, Options
from apex_engine.quantize.methods import METHODS
from apex_engine.quantize.source import ALIASES


def parser() -> argparse.ArgumentParser:
    default = Options()
    p = argparse.ArgumentParser(
        prog="python -m apex_engine.quantize",
        description="Write an apex checkpoint: the model's dense part as it is, and two twins of every routed expert, HIGH "
        "(16-bit or INT8) and LOW (INT2). One pass over the source, never more than about a layer in memory; a run that was "
        "cut short goes on where it stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("source", help=f"a model's directory, a hub id (owner/name), or one of: {', '.join(ALIASES)}")
    p.add_argument(
        "-o",
        "--output",
        type=Path,
        default=argparse.SUPPRESS,
        help="folder to write (default: ./checkpoints/NAME-apex)",
    )
    p.add_argument(
        "--verify",
        action="store_true",
        help="instead: SOURCE is an apex checkpoint; read it all and compare its checksums",
    )
    p.add_argument(
        "--high",
        choices=HIGH_FORMATS,
        default=default.high,
        help="HIGH twin; 16bit is the source's own dtype and lossless",
    )
    p.add_argument(
        "--low-method",
        choices=METHODS,
        default=default.low_method,
        help="how the LOW twin is found; gptq, which needs --importance, takes longest and halves the damage of clip",
    )
    p.add_argument(
        "--importance",
        type=Path,
        metavar="CHECKPOINT",
        default=argparse.SUPPRESS,
        help="an apex checkpoint of the same model that `python -m apex_engine.calibrate` has been over: what its experts "
        "are given decides which weights of the LOW twin matter (default: all count the same)",
    )
    p.add_argument("--device", default="cpu", help="what does the arithmetic: cpu, cuda, cuda:1")
    p.add_argument(
        "--low-down",
        type=int,
        choices=(2, 3, 4),
        default=default.low_down,
        help="bits of the LOW twin's down matrix, the fragile one: 3 halves the damage for 0.33 bits a weight more",
    )
    p.add_argument(
        "--group-size",
        type=int,
        default=default.group_size,
        metavar="G",
        help=f"inputs that share a scale and a zero in the LOW twin, one of {', '.join(map(str, GROUP_SIZES))}",
    )
    return p


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.verify:
        verify(Path(args.source), lambda name: say(f"reading {name}"))
        say(f"{args.source} is as it was written")
        return
    moments = Moments(args.importance) if "importance" in args else None
    options = Options(
        args.high, args.low_method, args.low_down, args.group_size, moments.identity if moments else Options.importance
    )
    name = Path(args.source).resolve().name
    folder = getattr(args, "output", Path("checkpoints") / f"{name}-apex")
    quantize(args.source, folder, options, moments, str(parse_device(args.device)))


if __name__ == "__main__":
    run(main)
