"""python -m apex_engine.quantize SOURCE -o FOLDER: write the HIGH and LOW twin of every routed expert."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from apex_engine.command import console, human, parse_device, progress_bar, run, say
from apex_engine.kernels.layout import MATRICES
from apex_engine.kernels.packing import GROUP_SIZES
from apex_engine.quantize.checkpoint import Manifest, verify
from apex_engine.quantize.convert import HIGH_FORMATS, JOURNAL, Options, convert
from apex_engine.quantize.methods import METHODS
from apex_engine.quantize.moments import Moments
from apex_engine.quantize.source import ALIASES, Source, resolve


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


def main() -> None:
    args = parser().parse_args()
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


def quantize(
    name: str, folder: Path, options: Options, moments: Moments | None = None, device: str = "cpu"
) -> Manifest:
    """`convert` with a progress bar and the table at the end, on stderr."""
    source = Source(resolve(name))
    resumes = (folder / JOURNAL).is_file()
    total = sum(layer.experts for layer in source.layers)
    bar = progress_bar("quantizing experts")
    task = bar.add_task("", total=total)

    def advance(experts: int) -> None:
        if not bar.live.is_started:  # only now: what is refused before the first expert is refused in one line
            if resumes:
                say(f"going on with the unfinished conversion in {folder}")
            bar.start()
        bar.advance(task, experts)

    try:
        manifest, done = convert(name, source, folder, options, advance, moments, device)
    except KeyboardInterrupt:
        say("what is finished is kept: run the same command again, it goes on where it stopped")
        raise
    finally:
        if bar.live.is_started:
            bar.stop()
    if done:
        for note in source.notes:
            say(f"note: {note}")
        report(manifest)
        say(f"written to {folder}")
    else:
        say(f"{folder} is complete already: nothing to do")
    return manifest


def report(manifest: Manifest) -> None:
    """Print what the twins cost in bytes and in error."""
    experts = manifest.experts * len(manifest.layers)
    table = Table(title=f"{experts} experts in {len(manifest.layers)} layers, dense part {human(manifest.dense_bytes)}")
    for column in ("twin", "matrix", "format", "relative error", "worst one", "at layer, expert"):
        table.add_column(column, justify="left" if column in ("twin", "matrix", "format") else "right")
    for twin, layout in (("high", manifest.high), ("low", manifest.low)):
        for matrix in MATRICES:
            row = manifest.errors[f"{twin}.{matrix}"]
            worst = row["worst"]
            at = f"{worst['layer']}, {worst['expert']}" if worst["error"] else "exact"
            form = layout.format(matrix).name
            table.add_row(twin.upper(), matrix, form, f"{row['error']:.4f}", f"{worst['error']:.4f}", at)
    console.print(table)
    for twin, layout in (("HIGH", manifest.high), ("LOW", manifest.low)):
        say(
            f"{twin:4} {layout.stride:,} bytes an expert, {layout.bits_per_weight:.2f} bits a weight with scales and "
            f"padding, {human(layout.stride * experts)} in all"
        )
    for what, count in manifest.fallbacks.items():
        say(
            f"note: {count} LOW matrices of {2 * experts} are {what}: too few calibration tokens chose their experts (calibrate "
            "with more --tokens), or the calibration's --block is smaller than a group"
        )


if __name__ == "__main__":
    run(main)
