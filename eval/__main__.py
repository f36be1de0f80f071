"""python -m apex_engine.eval CHECKPOINT: run lm-eval on the engine and on its reference, and report what changed.

reference          exact mode of the same checkpoint, or a model through transformers
each --mode        the same items, the same seeds        ->  eval/delta.py  ->  eval/report.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import time
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from apex_engine.arguments import add_engine_options, open_checkpoint, read_tokenizer
from apex_engine.command import run, say
from apex_engine.config import MODES
from apex_engine.eval.delta import LIMIT, mean_drop, overall, task_rows
from apex_engine.eval.machine import machine
from apex_engine.eval.perplexity import Comparison
from apex_engine.eval.report import headline, write
from apex_engine.eval.texts import read_text, strided, token_ids
from apex_engine.ledger import Ledger
from apex_engine.perplexity import Pair, default_texts, load_reference, load_to_compare, quieten
from apex_engine.quantize.checkpoint import Manifest
from apex_engine.thresholds import read_calibration, twins_of
from apex_engine.vocabulary import ApexError

TASKS = Path(__file__).resolve().parent / "tasks"  # ours, beside lm-eval's own
REFERENCE = "reference"
DIGITS = 5  # significant ones that are reported: further ones depend on how requests were batched


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m apex_engine.eval",
        description="What the engine's precision costs in accuracy: lm-eval's tasks on the engine and on the reference, item by "
        "item, and the perplexity and KL divergence of a text. Writes report.md, report.json and report.html. A run that was "
        "stopped goes on where it was.",
    )
    p.add_argument("model", nargs="?", help="an apex checkpoint; default, and `tiny`: the bundled model")
    p.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="for the report; default: ./reports/MODEL-TASKS")
    p.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=["deterministic"],
        metavar="MODE",
        help="of the engine: deterministic, whose answers depend on the request alone, adaptive, which serves one request at a "
        "time from an empty cache, exact; default: deterministic",
    )
    p.add_argument(
        "--reference",
        type=Path,
        metavar="FOLDER",
        help="a Hugging Face model to compare with, through transformers; default: all HIGH twins of the same checkpoint",
    )
    tasks = p.add_argument_group("tasks (lm-eval's own options)")
    tasks.add_argument(
        "--tasks", default="apex_demo", help="comma-separated; default: apex_demo, which needs no network"
    )
    tasks.add_argument("--include-path", type=Path, metavar="FOLDER", help="more tasks")
    tasks.add_argument("--limit", type=float, help="items of each task, or a share of them below 1; default: all")
    tasks.add_argument("--num-fewshot", type=int, help="default: the task's")
    tasks.add_argument("--batch-size", type=int, default=8, help="requests at a time; default: %(default)s")
    tasks.add_argument(
        "--apply-chat-template", action="store_true", help="give prompts through the tokenizer's chat template"
    )
    text = p.add_argument_group("text")
    text.add_argument(
        "--text",
        nargs="+",
        metavar="TEXT",
        help="files or datasets (owner/name:config:split); default: wikitext, or the held-out text of the bundled model",
    )
    text.add_argument("--text-tokens", type=int, default=8192, help="of each text; default: %(default)s")
    text.add_argument("--length", type=int, default=256, help="tokens seen at once; default: %(default)s")
    add_engine_options(p)
    return p


def main() -> None:
    args = parser().parse_args()
    for name in ("batch_size", "text_tokens", "length"):
        if getattr(args, name) < 1:
            raise ApexError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    if args.mode:
        raise ApexError(f"--mode {args.mode} is for one run: name the modes to report on with --modes {args.mode}")
    _quieten()
    folder, manifest = open_checkpoint(args.model)
    tokenizer = read_tokenizer(folder)
    model = load_to_compare(args, folder)
    pair = Pair(model, load_reference(args.reference, model))
    output = args.output or Path("reports") / f"{folder.resolve().name}-{args.tasks.replace(',', '-')}"
    bench = Bench(args, pair, tokenizer, manifest, output)
    results, seconds = {}, {}
    for who in (REFERENCE, *args.modes):
        say(f"{who}: {args.tasks}")
        start = time.perf_counter()
        results[who] = bench.tasks(who)
        seconds[who] = time.perf_counter() - start
    rows = task_rows(results[REFERENCE], {mode: results[mode] for mode in args.modes})
    texts, ledgers, missing = bench.texts()
    report = make_report(args, folder, bench, rows, texts, ledgers, missing, seconds)
    paths = write(report, output)
    say(f"written to {', '.join(map(str, paths))}")
    print(headline(report))


class Bench:
    """The engine and the reference, and everything both are measured on."""

    def __init__(
        self,
        args: argparse.Namespace,
        pair: Pair,
        tokenizer: Any,
        manifest: Manifest,
        output: Path,
    ) -> None:
        self.args, self.pair, self.tokenizer = args, pair, tokenizer
        self.manifest, self.output = manifest, output

    def tasks(self, who: str) -> dict[str, Any]:
        """lm-eval's result with samples. Answers are kept in the output folder as they come, and not asked for again."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from apex_engine.eval.lm import OneByOne

        args = self.args
        folders = [str(folder) for folder in (TASKS, args.include_path) if folder]
        manager = TaskManager(include_path=folders)
        names = args.tasks.split(",")
        if unknown := [name for name in names if name not in manager.all_tasks]:
            raise ApexError(
                f"lm-eval has no task {', '.join(unknown)}: `lm_eval ls tasks` lists its own, apex_demo is ours"
            )
        options = {"tokenizer": self.tokenizer, "batch_size": args.batch_size}
        model = self.pair.reference() if who == REFERENCE else self.pair.in_mode(who)
        lm = OneByOne(model, **options) if who == "adaptive" else HFLM(pretrained=model, **options)
        cache = self.output / "cache" / f"{who}-{self._identity(who)}"
        cache.parent.mkdir(parents=True, exist_ok=True)
        try:
            found: dict[str, Any] = simple_evaluate(
                lm,
                tasks=names,
                task_manager=manager,
                num_fewshot=args.num_fewshot,
                limit=int(args.limit) if args.limit and args.limit >= 1 else args.limit,
                apply_chat_template=args.apply_chat_template,
                use_cache=str(cache),
                log_samples=True,
                bootstrap_iters=0,  # the errors that count are those of the differences
            )
        except (ConnectionError, FileNotFoundError) as error:
            raise ApexError(
                f"the data of {args.tasks} cannot be had ({str(error).splitlines()[0]}): apex_demo needs none"
            ) from None
        return found

    def texts(self) -> tuple[dict[str, dict[str, Comparison]], dict[str, Ledger], list[str]]:
        """Text -> mode -> comparison with the reference; the modes' ledgers; what could not be measured, and why."""
        args = self.args
        ledgers = {mode: Ledger() for mode in args.modes}
        found: dict[str, dict[str, Comparison]] = {}
        missing = []
        for name in args.text or default_texts(self.manifest):
            try:
                ids = token_ids(self.tokenizer, read_text(name))[: args.text_tokens]
                windows = strided(ids, args.length, args.length)
            except ApexError as error:
                if args.text:
                    raise
                missing.append(f"text: {error}")
                continue
            say(f"{Path(name).stem}: {len(windows)} windows of {args.length} tokens")
            # One window at a time, whatever the batch size of the tasks: bytes and hit rates are those of this order.
            found[Path(name).stem] = {mode: self.pair.compare(windows, mode, ledgers[mode]) for mode in args.modes}
        return found, ledgers, missing

    def _identity(self, who: str) -> str:
        """Answers are those of this model, these options and this software: anything else asks anew."""
        args = self.args
        parts: dict[str, Any] = {
            "twins": twins_of(self.manifest),
            "reference": str(args.reference and args.reference.resolve()) if who == REFERENCE else None,
            "thresholds": dataclasses.asdict(self.pair.engine.thresholds) if who not in (REFERENCE, "exact") else None,
            "config": {**vars(self.pair.engine.config), "mode": who}
            if who == "adaptive"
            else self.pair.engine.config.kernels,
            "dtype": str(self.pair.reference().dtype),
            "device": args.device,
            "template": args.apply_chat_template,
            "versions": _versions(),
        }
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def make_report(
    args: argparse.Namespace,
    folder: Path,
    bench: Bench,
    rows: list[dict[str, Any]],
    texts: dict[str, dict[str, Comparison]],
    ledgers: dict[str, Ledger],
    missing: list[str],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The dict that `eval/report.py` renders."""
    manifest, engine = bench.manifest, bench.pair.engine
    means = {mode: mean_drop(rows, mode) for mode in args.modes}
    first = args.modes[0]
    calibration = read_calibration(folder, manifest)
    report = {
        "verdict": overall(rows, means[first], first),
        "limit": LIMIT,
        "checkpoint": {
            "folder": folder.resolve().name,
            "source": manifest.source,
            "fingerprint": manifest.fingerprint,
            "high": manifest.high.up.name,
            "low": {"up": manifest.low.up.name, "down": manifest.low.down.name},
            "low_method": manifest.options["low_method"],
            "low_bits": manifest.low.bits_per_weight,
        },
        "reference": f"{args.reference} through transformers"
        if args.reference
        else f"all HIGH twins ({manifest.high.up.name}) of the same checkpoint, mode exact",
        "thresholds": {
            "t1": engine.thresholds.t1,
            "t2": engine.thresholds.t2,
            "from": engine.thresholds.origin,
        },
        "modes": args.modes,
        "settings": {
            "tasks": args.tasks,
            "limit": args.limit,
            "num_fewshot": args.num_fewshot,
            "apply_chat_template": args.apply_chat_template,
            "dtype": str(bench.pair.reference().dtype).removeprefix("torch."),
            "memory": engine.config.memory,
            "policy": engine.config.policy,
            "text_tokens": args.text_tokens,
            "length": args.length,
        },
        "tasks": rows,
        "mean": means,
        "text": _text(texts),
        "ledger": {mode: _ledger(ledger) for mode, ledger in ledgers.items()} if texts else {},
        "not_measured": missing + _cautions(args, manifest),
        "curve": _curve(calibration),
        "versions": _versions(),
        "hardware": machine(bench.pair.in_mode(first).device),
        "seconds": seconds,
    }
    rounded: dict[str, Any] = _rounded(report)
    return rounded


def _text(texts: dict[str, dict[str, Comparison]]) -> dict[str, Any] | None:
    if not texts:
        return None
    modes = list(next(iter(texts.values())))
    joined = {mode: Comparison.joined([found[mode] for found in texts.values()]) for mode in modes}

    def row(found: dict[str, Comparison]) -> dict[str, Any]:
        any_mode = next(iter(found.values()))
        return {
            "tokens": any_mode.tokens,
            "reference_perplexity": any_mode.reference_perplexity,
            "modes": {mode: comparison.summary() for mode, comparison in found.items()},
        }

    return {
        "what": ", ".join(texts),
        **row(joined),
        "by_text": [{"name": name, **row(found)} for name, found in texts.items()],
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    summary = ledger.summary()
    return {name: summary[name] for name in ("calls", "share_of_calls", "share_of_gate_mass", "bytes_read", "hit_rate")}


def _cautions(args: argparse.Namespace, manifest: Manifest) -> list[str]:
    if not args.reference and manifest.high.up.name == "int8":
        return ["the reference's HIGH twins are INT8, not the source's 16 bits: --reference SOURCE compares with those"]
    return []


def _curve(calibration: dict[str, Any] | None) -> list[dict[str, float]] | None:
    if calibration is None:
        return None
    names = ("kl", "share_low", "share_skip", "gate_mass_low")
    return [{name: point[name] for name in names} for point in calibration["curve"]]


def _rounded(value: Any) -> Any:
    """Floats to DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "lm_eval", "datasets", "numpy")
    found = {"apex_engine": version("apex-engine"), **{name: version(name) for name in names}}
    if commit := _commit():
        found["commit"] = commit
    return found


def _commit() -> str | None:
    """Of a checkout of this project; None elsewhere."""
    git = ["git", "-C", str(TASKS.parent.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    if not (TASKS.parent.parent / "pyproject.toml").is_file():
        return None
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _quieten() -> None:
    quieten()
    for name in ("lm_eval", "datasets", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    run(main)
