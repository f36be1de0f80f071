"""python -m apex_engine.calibrate CHECKPOINT: find out what the LOW twins cost, layer by layer, and how far to use them."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from apex_engine.calibration.settings import Settings
from apex_engine.checkpoint.atomic import check_writable
from apex_engine.cli.console import program, quieten, run, say
from apex_engine.errors import ApexError

MAX_KL = 0.01  # nats a token; twice that costs the bundled model a point of accuracy (docs/delta-report.md)


def parser() -> argparse.ArgumentParser:
    default = Settings()
    p = argparse.ArgumentParser(
        prog=program("calibrate"),
        description="Measure what the LOW twins of an apex checkpoint cost, and choose the thresholds of each layer for a limit. "
        "Writes calibration.json, which every later run of the checkpoint uses, and calibration.safetensors, from which `python "
        "-m apex_engine.quantize --importance` makes better LOW twins.",
    )
    p.add_argument("model", help="an apex checkpoint; `tiny`: the bundled model")
    p.add_argument(
        "--data",
        default=default.data,
        help="a text file, a dataset (owner/name:config:split), or self: text the model writes itself, which needs neither, but "
        "as many steps as --length, each with nearly all experts; default: %(default)s",
    )
    limit = p.add_mutually_exclusive_group()
    limit.add_argument(
        "--max-kl", type=float, metavar="NATS", help=f"limit of the mean KL divergence a token; default: {MAX_KL:g}"
    )
    limit.add_argument("--max-drop", metavar="SHARE", help="instead: how much the perplexity may rise, such as 0.5%%")
    p.add_argument("--tokens", type=int, default=default.tokens, help="of text; default: %(default)s")
    p.add_argument("--length", type=int, default=default.length, help="tokens seen at once; default: %(default)s")
    p.add_argument("--batch-size", type=int, default=default.batch_size, help="windows a pass; default: %(default)s")
    p.add_argument(
        "--block",
        type=int,
        default=default.block,
        help="columns whose second moments are taken together, for --low-method gptq; 1 takes little memory; "
        "default: %(default)s",
    )
    p.add_argument("--memory", default=default.memory, help="for resident experts; default: %(default)s")
    p.add_argument("--device", default=default.device, help="cpu, cuda, cuda:1; default: %(default)s")
    p.add_argument("--seed", type=int, default=default.seed, help="of the text the model writes; default: %(default)s")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the trade-off there (.svg, .png)")
    return p


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    kind, most = _limit(args)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    if args.plot and (find_spec("matplotlib") is None or args.plot.suffix not in (".svg", ".png", ".pdf")):
        raise ApexError(
            f"--plot {args.plot}: needs matplotlib (pip install 'apex-engine[eval]') and .svg, .png or .pdf"
        )
    if args.plot:
        check_writable(args.plot)
    # With torch and transformers, which --help does not need.
    from apex_engine.calibration.measure import calibrate
    from apex_engine.calibration.search import Limit
    from apex_engine.checkpoint.calibration import CALIBRATION
    from apex_engine.cli.checkpoint import open_checkpoint
    from apex_engine.cli.tradeoff import plot, show

    quieten()
    folder, manifest = open_checkpoint(args.model)
    limit = Limit(kind, most)
    content = calibrate(folder, limit, settings)
    show(content, manifest)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(content, args.plot)
    point = content["measured"]
    say(f"written to {folder / CALIBRATION}: every later run of this checkpoint uses these thresholds")
    print(
        f"{limit}: measured KL {point['kl']:.4f}, perplexity {point['change']:+.2%}, "
        f"{point['share_low']:.0%} of calls LOW, {point['share_skip']:.1%} skipped"
    )


def _limit(args: argparse.Namespace) -> tuple[str, float]:
    """Kind and value of the `Limit` that was asked for. Raises ApexError."""
    if args.max_drop is None:
        value = MAX_KL if args.max_kl is None else args.max_kl
        kind = "kl"
    else:
        kind = "perplexity"
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", args.max_drop)
        if not match:
            raise ApexError(f"--max-drop {args.max_drop} is not understood: give a percentage such as 0.5%")
        value = float(match[1]) / 100
    if not 0 < value <= 10:
        raise ApexError(f"the limit must be above 0 and at most 10, not {value:g}")
    return kind, value


if __name__ == "__main__":
    run(main)
