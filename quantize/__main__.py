"""python -m apex_engine.quantize SOURCE -o FOLDER: write the HIGH and LOW twin of every routed expert."""

from __future__ import annotations

import argparse
from pathlib import Path

from apex_engine.cli.console import program, run
from apex_engine.quantize.forms import high_forms, low_forms
from apex_engine.quantize.methods.table import METHODS
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.names import ALIASES


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=program("quantize"),
        description="Write an apex checkpoint: the model's dense part as it is, and two twins of every routed expert, HIGH "
        "(16-bit or INT8) and LOW (INT2, or what --low says). One pass over the source, never more than about a layer in "
        "memory; a run that was cut short goes on where it stopped.",
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
    _add_twins(p)
    p.add_argument("--device", default="cpu", help="what does the arithmetic: cpu, cuda, cuda:1")
    return p


def _add_twins(p: argparse.ArgumentParser) -> None:
    """The fields of `Options`."""
    default = Options()
    p.add_argument(
        "--high",
        choices=high_forms(),
        default=default.high,
        help="HIGH twin; 16bit is the source's own dtype and lossless",
    )
    p.add_argument(
        "--low",
        choices=low_forms(),
        default=default.low,
        help="LOW twin: the format of its matrices, or of the up and the down matrix; fewer bytes than HIGH",
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
    p.add_argument(
        "--low-down",
        type=int,
        choices=(2, 3, 4),
        default=default.low_down,
        help="bits of the down matrix of an int2 LOW twin, the fragile one: 3 halves the damage for 0.33 bits a weight more",
    )
    p.add_argument(
        "--group-size",
        type=int,
        default=default.group_size,
        metavar="G",
        help="inputs that share a scale and a zero in the LOW twin, one of 8, 16, 32, 64, 128, 256",
    )


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.verify:
        from apex_engine.cli.verifying import verify_checkpoint

        return verify_checkpoint(Path(args.source))
    # Only now: what they import takes seconds, and --help needs none of it.
    from apex_engine.checkpoint.moments import Moments
    from apex_engine.cli.quantizing import quantize
    from apex_engine.memory.probe import parse_device

    moments = Moments(args.importance) if "importance" in args else None
    options = Options(
        high=args.high,
        low=args.low,
        low_method=args.low_method,
        low_down=args.low_down,
        group_size=args.group_size,
        importance=moments.identity if moments else Options.importance,
    )
    options.check()
    name = Path(args.source).resolve().name
    folder = getattr(args, "output", Path("checkpoints") / f"{name}-apex")
    quantize(args.source, folder, options, moments, str(parse_device(args.device)))


if __name__ == "__main__":
    run(main)
