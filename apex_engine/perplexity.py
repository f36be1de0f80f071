"""python -m apex_engine.perplexity CHECKPOINT: perplexity of a text, and how far the engine is from its reference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from rich.progress import track
from rich.table import Table
from torch import Tensor

from apex_engine.cli.console import console, quieten, run, say
from apex_engine.cli.options import add_engine_options, open_checkpoint, read_tokenizer
from apex_engine.config import SYSTEMS
from apex_engine.core.ledger import Ledger
from apex_engine.errors import ApexError
from apex_engine.eval.options import add_pair_options
from apex_engine.eval.pair import load_pair, read_windows
from apex_engine.eval.perplexity import Comparison


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m apex_engine.perplexity",
        description="Perplexity of a text, KL(reference || engine) and the share of tokens that both find likeliest, with "
        "standard errors. The reference is exact mode of the same checkpoint, or a model through transformers.",
    )
    add_pair_options(p, "--tokens", 16384)
    p.add_argument(
        "--stride",
        type=int,
        help="tokens from window to window, of each of which as many count, the last; default: as --length: no overlap",
    )
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(p, mode="deterministic", prefetch="always 0 here", dtype="float32 on a CPU, else the model's")
    return p


def main() -> None:
    args = parser().parse_args()
    stride = args.length if args.stride is None else args.stride
    if not (args.tokens >= args.length > 1 and 1 <= stride <= args.length):
        raise ApexError("--tokens must be at least --length, which is at least 2, and --stride from 1 to --length")
    quieten()
    folder, manifest = open_checkpoint(args.model)
    tokenizer = read_tokenizer(folder)
    texts, missing = read_windows(args.text, manifest, tokenizer, args.tokens, args.length, stride)
    if missing:
        raise ApexError(f"{missing[0].removeprefix('text: ')} with --text")
    pair, mode, ledger = load_pair(args, folder, args.reference), _mode(args), Ledger(manifest.words)
    last = None if stride == args.length else stride

    def watch(windows: tuple[Tensor, ...]) -> Iterable[Tensor]:
        return track(windows, "windows", console=console)

    found = {name: pair.compare(windows, {mode: ledger}, last, watch)[mode] for name, windows in texts.items()}
    shares = ledger.summary()["share_of_calls"]
    if args.json:
        rows = {name: comparison.summary() for name, comparison in found.items()}
        print(json.dumps({"mode": mode, "texts": rows, "share_of_calls": shares}, indent=1))
        return
    show(found, f"{mode} against {args.reference or 'exact'}")
    say(f"calls LOW {shares['low']:.1%}, skipped {shares['skip']:.1%}; thresholds {pair.engine.thresholds.origin}")
    joined = Comparison.joined(list(found.values())).summary()
    print(f"perplexity {joined['perplexity']:.3f} ({joined['change']:+.2%}), KL {joined['kl']:.4f}")


def _mode(args: argparse.Namespace) -> str:
    """The one asked for, by name or by a preset."""
    return args.mode or SYSTEMS[args.system or "default"].get("mode", "deterministic")


def show(found: dict[str, Comparison], title: str) -> None:
    """The table on stderr."""
    table = Table(title=title, title_justify="left")
    for column in ("text", "tokens", "reference", "perplexity", "change", "KL", "same likeliest token"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for name, comparison in found.items():
        row = comparison.summary()
        table.add_row(
            name,
            f"{row['tokens']:,}",
            f"{row['reference_perplexity']:.2f}",
            f"{row['perplexity']:.2f}",
            f"{row['change']:+.2%}{_error(row['change_stderr'], '.2%')}",
            f"{row['kl']:.4f}{_error(row['kl_stderr'], '.4f')}",
            f"{row['agreement']:.1%}",
        )
    console.print(table)


def _error(value: Any, spec: str) -> str:
    return "" if value is None else f" ± {value:{spec}}"


if __name__ == "__main__":
    run(main)
