"""python -m apex_engine.perplexity CHECKPOINT: perplexity of a text, and how far the engine is from its reference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from apex_engine.arguments import add_engine_options, engine_config, open_checkpoint, read_tokenizer
from apex_engine.command import console, parse_device, run, say
from apex_engine.eval.perplexity import Comparison, decoded_logits, judge, window_logits
from apex_engine.eval.texts import read_text, strided, token_ids
from apex_engine.hook import load
from apex_engine.ledger import Ledger
from apex_engine.quantize.checkpoint import Manifest
from apex_engine.quantize.source import ALIASES
from apex_engine.vocabulary import ApexError

WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1:test"


class Pair:
    """The engine of a checkpoint and its reference: another model, or the same one in `exact` mode."""

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel | None = None) -> None:
        self.engine, self._model, self._reference = model.apex, model, reference or model

    def reference(self) -> PreTrainedModel:
        """Ready to be asked; so is the engine only after `in_mode`."""
        if self._reference is self._model:
            self.engine.decide("exact")
        return self._reference

    def in_mode(self, mode: str) -> PreTrainedModel:
        self.engine.decide(mode)
        return self._model

    def compare(
        self,
        windows: Tensor,
        mode: str,
        ledger: Ledger,
        last: int | None = None,
        watch: Callable[[Any], Iterator[Tensor]] = iter,
    ) -> Comparison:
        """On `windows` `[W, N]`, one at a time, `last` predictions of each; `ledger` counts what the engine did in `mode`.

        In `adaptive` mode each window is decoded token by token, from an empty cache.
        """
        parts = []
        self.engine.evict_all()
        for row in watch(windows.split(1)):
            self.engine.reset_stats()
            truth = window_logits(self.reference(), row)
            model = self.in_mode(mode)
            self.engine.reset_stats(ledger)
            if mode == "adaptive":
                self.engine.evict_all()
            parts.append(judge(row, truth, (decoded_logits if mode == "adaptive" else window_logits)(model, row), last))
        return Comparison.joined(parts)


def default_texts(manifest: Manifest) -> list[str]:
    """The held-out text of the bundled model, else wikitext."""
    own = Path(ALIASES["tiny"]) / "text"
    if manifest.source == "tiny" and own.is_dir():
        return [str(path) for path in sorted(own.glob("*.txt"))]
    return [WIKITEXT]


def load_reference(folder: Path | None, model: PreTrainedModel) -> PreTrainedModel | None:
    """A Hugging Face model in the dtype and on the device of `model`. Raises ApexError."""
    if folder is None:
        return None
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ApexError(f"--reference {folder} is no model transformers can load ({why})") from None


def load_to_compare(args: argparse.Namespace, folder: Path) -> PreTrainedModel:
    """The checkpoint, with slots for both twins.

    In float32 on a CPU, unless a dtype is given: in 16 bits, sums and with them answers depend on what else is in a batch. With
    the kernels of `deterministic` mode, which keep to transformers' own sums. Without prefetching, so that bytes do not depend
    on the time that reads take.
    """
    device = parse_device(args.device)
    dtype = "float32" if args.dtype == "auto" and device.type == "cpu" else args.dtype
    options = {**vars(engine_config(args, device, prefetch=0)), "mode": "deterministic", "upgrade": "wait"}
    return load(folder, dtype=None if dtype == "auto" else dtype, device=device, **options)


def quieten() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m apex_engine.perplexity",
        description="Perplexity of a text, KL(reference || engine) and the share of tokens that both find likeliest, with "
        "standard errors. The reference is exact mode of the same checkpoint, or a model through transformers.",
    )
    p.add_argument("model", nargs="?", help="an apex checkpoint; default, and `tiny`: the bundled model")
    p.add_argument(
        "--text",
        nargs="+",
        metavar="TEXT",
        help="files or datasets (owner/name:config:split); default: wikitext, or the held-out text of the bundled model",
    )
    p.add_argument("--tokens", type=int, default=16384, help="of each text; default: %(default)s")
    p.add_argument("--length", type=int, default=256, help="tokens of a window; default: %(default)s")
    p.add_argument(
        "--stride",
        type=int,
        help="tokens from window to window, of each of which as many count, the last; default: as --length: no overlap",
    )
    p.add_argument(
        "--reference", type=Path, metavar="FOLDER", help="a Hugging Face model; default: the checkpoint, exact"
    )
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(p)
    return p


def main() -> None:
    args = parser().parse_args()
    stride = args.length if args.stride is None else args.stride
    if not (args.tokens >= args.length > 1 and 1 <= stride <= args.length):
        raise ApexError("--tokens must be at least --length, which is at least 2, and --stride from 1 to --length")
    quieten()
    folder, manifest = open_checkpoint(args.model)
    tokenizer = read_tokenizer(folder)
    names = args.text or default_texts(manifest)
    texts = {name: strided(token_ids(tokenizer, read_text(name))[: args.tokens], args.length, stride) for name in names}
    mode = args.mode or "deterministic"
    model = load_to_compare(args, folder)
    pair = Pair(model, load_reference(args.reference, model))
    ledger = Ledger()
    last = None if stride == args.length else stride

    def watch(windows: Any) -> Any:
        return track(windows, "windows", console=console)

    found = {Path(name).stem: pair.compare(windows, mode, ledger, last, watch) for name, windows in texts.items()}
    shares = ledger.summary()["share_of_calls"]
    if args.json:
        rows = {name: comparison.summary() for name, comparison in found.items()}
        print(json.dumps({"mode": mode, "texts": rows, "share_of_calls": shares}, indent=1))
        return
    table = Table(title=f"{mode} against {args.reference or 'exact'}", title_justify="left")
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
    joined = Comparison.joined(list(found.values())).summary()
    say(f"calls LOW {shares['low']:.1%}, skipped {shares['skip']:.1%}" if shares["low"] is not None else "no calls")
    print(f"perplexity {joined['perplexity']:.3f} ({joined['change']:+.2%}), KL {joined['kl']:.4f}")


def _error(value: Any, spec: str) -> str:
    return "" if value is None else f" ± {value:{spec}}"


if __name__ == "__main__":
    run(main)
