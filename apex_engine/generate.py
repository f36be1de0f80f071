"""python -m apex_engine.generate [MODEL] [PROMPT]: text from an apex checkpoint, under a memory budget, with its ledger."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from apex_engine.cli.console import program, run
from apex_engine.cli.options import add_engine_options
from apex_engine.errors import ApexError, check_seed, flag

# transformers' own generation flags: name -> (type, least, most, only with --do-sample)
SAMPLING: dict[str, tuple[type, float, float, bool]] = {
    "temperature": (float, 1e-6, math.inf, True),
    "top_k": (int, 0, math.inf, True),
    "top_p": (float, 1e-6, 1.0, True),
    "min_p": (float, 0.0, 1.0, True),
    "repetition_penalty": (float, 1e-6, math.inf, False),
    "no_repeat_ngram_size": (int, 0, math.inf, False),
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=program("generate"),
        description="Generate text with an apex checkpoint. Without arguments: the bundled model (quantized on first use) and a "
        "prompt of its own. The default mode, adaptive, serves some experts at INT2 or not at all; the ledger at the end "
        "says how much, and --mode exact forbids it.",
    )
    p.add_argument(
        "model",
        nargs="?",
        help="folder written by `python -m apex_engine.quantize`; default, and `tiny`: the bundled model",
    )
    p.add_argument("prompt", nargs="?", help="the prompt; `-` reads it from stdin")
    p.add_argument("-f", "--file", type=Path, help="read the prompt from a file")
    p.add_argument(
        "--raw", action="store_true", help="give the prompt as it is, although the tokenizer has a chat template"
    )
    p.add_argument("-n", "--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    engine = add_engine_options(p)
    engine.add_argument(
        "--stats", choices=("table", "json", "none"), default="table", help="plan and ledger, on stderr; default: table"
    )
    sampling = p.add_argument_group("sampling (transformers' own flags)")
    sampling.add_argument("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    for name, (kind, *_) in SAMPLING.items():
        sampling.add_argument(flag(name), type=kind, metavar="X")
    sampling.add_argument("--seed", type=int, default=0, help="of the sampling; default: %(default)s")
    return p


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    sampling = sampling_options(args)
    from apex_engine.cli.generating import generate  # with torch and transformers, which --help does not need

    generate(args, sampling)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, checked."""
    check_seed(args.seed)
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    for name, value in given.items():
        _, least, most, only_sampling = SAMPLING[name]
        if only_sampling and not args.do_sample:
            raise ApexError(f"{flag(name)} has no effect without --do-sample: add it, or drop the flag")
        if not least <= value <= most:
            raise ApexError(f"{flag(name)} {value} is out of range: from {least:g} to {most:g}")
    return given


if __name__ == "__main__":
    run(main)
