"""python -m apex_engine.eval CHECKPOINT: run lm-eval on the engine and on its reference, and report what changed.

reference          exact mode of the same checkpoint, or a model through transformers
each of --modes    the same items, the same seeds        ->  eval/delta.py  ->  eval/report.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import time
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.atomic import check_writable
from apex_engine.checkpoint.calibration import read_calibration, twins_of
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.cli.checkpoint import open_checkpoint, read_tokenizer
from apex_engine.cli.console import quieten, run, say
from apex_engine.cli.options import add_engine_options
from apex_engine.config import MODES
from apex_engine.core.ledger import Ledger
from apex_engine.errors import ApexError, first_line, flag
from apex_engine.eval.delta import LIMIT, mean_drop, overall, task_rows
from apex_engine.eval.machine import machine
from apex_engine.eval.options import add_pair_options
from apex_engine.eval.pair import Pair, load_pair, read_windows
from apex_engine.eval.perplexity import Comparison
from apex_engine.eval.report import headline, write

TASKS = Path(__file__).resolve().parent / "tasks"  # ours, beside lm-eval's own
REFERENCE = "reference"
DIGITS = 6  # significant ones that are reported


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m apex_engine.eval",
        description="What the engine's precision costs in accuracy: lm-eval's tasks on the engine and on the reference, item by "
        "item, and the perplexity and KL divergence of a text. Writes report.md, report.json and report.html. A run that was "
        "stopped goes on where it was.",
    )
    add_pair_options(p, "--text-tokens", 8192)
    p.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="for the report; default: ./reports/MODEL-TASKS")
    p.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=["deterministic"],
        metavar="MODE",
        help="of the engine: deterministic, whose answers depend on the request alone; adaptive, which serves one request at a "
        "time from an empty cache; exact; default: deterministic",
    )
    tasks = p.add_argument_group("tasks (lm-eval's own options)")
    add = tasks.add_argument
    add("--tasks", default="apex_demo", help="comma-separated; default: apex_demo, which needs no network")
    add("--include-path", type=Path, metavar="FOLDER", help="more tasks")
    add("--limit", type=float, help="items of each task, or a share of them below 1; default: all")
    add("--num-fewshot", type=int, help="default: the task's")
    add("--batch-size", type=int, default=8, help="requests that share loads; answers do not depend on it; default: 8")
    add(
        "--max-length",
        type=int,
        default=2048,
        help="tokens; longer requests lose their beginning; default: %(default)s",
    )
    add("--apply-chat-template", action="store_true", help="give prompts through the tokenizer's chat template")
    add_engine_options(p, mode="see --modes", prefetch="always 0 here", dtype="float32 on a CPU, else the model's")
    return p


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    _check(args)
    quieten()
    for name in ("lm_eval", "datasets", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder, manifest = open_checkpoint(args.model)
    tokenizer = read_tokenizer(folder)
    if args.apply_chat_template and not tokenizer.chat_template:
        raise ApexError(f"the tokenizer of {folder} has no chat template: drop --apply-chat-template")
    # What can be refused is refused before the hours of work.
    calibration = read_calibration(folder, manifest)
    windows, missing = read_windows(args.text, manifest, tokenizer, args.text_tokens, args.length, args.length)
    manager = _task_manager(args)
    output = args.output or Path("reports") / f"{folder.resolve().name}-{args.tasks.replace(',', '-')}"
    check_writable(output / "report.md")
    pair = load_pair(args, folder, args.reference)
    bench = Bench(args, folder, manifest, pair, calibration)
    results, seconds = {}, {}
    for who in (REFERENCE, *args.modes):
        say(f"{who}: {args.tasks}")
        start = time.perf_counter()
        results[who] = run_tasks(bench, who, tokenizer, manager, output / "cache")
        seconds[who] = time.perf_counter() - start
    rows, skipped = task_rows(results[REFERENCE], {mode: results[mode] for mode in args.modes})
    ledgers = {mode: Ledger(pair.engine.manifest.words) for mode in args.modes}
    texts = {}
    for name, some in windows.items():
        say(f"{name}: {len(some)} windows of {args.length} tokens")
        texts[name] = pair.compare(some, ledgers)
    report = make_report(bench, rows, texts, ledgers, missing + skipped, seconds)
    say(f"written to {', '.join(map(str, write(report, output)))}")
    print(headline(report))


def _check(args: argparse.Namespace) -> None:
    for name, least in (("batch_size", 1), ("max_length", 2), ("text_tokens", 2), ("length", 2), ("num_fewshot", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ApexError(f"{flag(name)} {getattr(args, name)}: at least {least}")
    if args.limit is not None and args.limit <= 0:
        raise ApexError(f"--limit {args.limit:g}: above 0, a number of items or a share of them")
    if not all(args.tasks.split(",")):
        raise ApexError(f"--tasks {args.tasks!r}: names with commas between them, such as apex_demo,arc_easy")
    if args.include_path and not args.include_path.is_dir():
        raise ApexError(f"--include-path {args.include_path} is no directory: name the one that holds the tasks' files")
    if args.mode:
        raise ApexError(f"--mode {args.mode} is for one run: name the modes to report on with --modes {args.mode}")
    if missing := [name for name in ("lm_eval", "datasets", "matplotlib") if find_spec(name) is None]:
        raise ApexError(f"{', '.join(missing)} not installed: pip install 'apex-engine[eval]'")


def _task_manager(args: argparse.Namespace) -> Any:
    """lm-eval's, with our tasks; it knows all of args.tasks."""
    from lm_eval.tasks import TaskManager

    folders = [str(folder) for folder in (TASKS, args.include_path) if folder]
    for defaults in (False, True):  # lm-eval's own are thousands: they are read only where they are needed
        manager = TaskManager(include_path=folders, include_defaults=defaults)
        unknown = [name for name in args.tasks.split(",") if name not in manager.all_tasks]
        if not unknown:
            break
    else:
        raise ApexError(
            f"lm-eval has no task {', '.join(unknown)}: `lm_eval ls tasks` lists its own, apex_demo is ours"
        )
    return manager


@dataclass(frozen=True)
class Bench:
    """What a report is about."""

    args: argparse.Namespace
    folder: Path
    manifest: Manifest
    pair: Pair
    calibration: dict[str, Any] | None


def run_tasks(bench: Bench, who: str, tokenizer: Any, manager: Any, cache: Path) -> dict[str, Any]:
    """lm-eval's result with samples. Answers are kept in the folder `cache` as they come, and not asked for again."""
    from lm_eval import simple_evaluate

    from apex_engine.eval.lm import EngineLM

    args, pair = bench.args, bench.pair
    model = pair.reference() if who == REFERENCE else pair.in_mode(who)
    lm = EngineLM(model, who == "adaptive", args.batch_size, tokenizer=tokenizer, max_length=args.max_length)
    cache.mkdir(parents=True, exist_ok=True)
    try:
        found: dict[str, Any] = simple_evaluate(
            lm,
            tasks=args.tasks.split(","),
            task_manager=manager,
            num_fewshot=args.num_fewshot,
            limit=int(args.limit) if args.limit and args.limit >= 1 else args.limit,
            apply_chat_template=args.apply_chat_template,
            use_cache=str(cache / f"{who}-{_identity(bench, who)}"),
            log_samples=True,
            bootstrap_iters=0,  # the errors that count are those of the differences
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise ApexError(
            f"the data of {args.tasks} cannot be had ({first_line(error)}): apex_demo needs no network"
        ) from None
    return found


def _identity(bench: Bench, who: str) -> str:
    """Answers are those of this model, these options and this software: anything else asks anew."""
    args, engine = bench.args, bench.pair.engine
    reference = args.reference if who == REFERENCE else None
    files = sorted(reference.iterdir()) if reference else []
    parts: dict[str, Any] = {
        "twins": twins_of(bench.manifest),
        "reference": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "thresholds": dataclasses.asdict(engine.thresholds) if who not in (REFERENCE, "exact") else None,
        "config": {**vars(engine.config), "mode": who} if who == "adaptive" else engine.config.kernels,
        "dtype": str(bench.pair.dtype),
        "device": args.device,
        "max_length": args.max_length,
        "template": args.apply_chat_template,
        "versions": _versions(),
        "changes": _git("diff", "HEAD"),
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def make_report(
    bench: Bench,
    rows: list[dict[str, Any]],
    texts: dict[str, dict[str, Comparison]],
    ledgers: dict[str, Ledger],
    missing: list[str],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The dict that `eval/report.py` renders."""
    args, manifest, engine = bench.args, bench.manifest, bench.pair.engine
    means = {mode: mean for mode in args.modes if (mean := mean_drop(rows, mode))}
    if not args.reference and manifest.high.up.name == "int8":
        missing = [*missing, "the reference has INT8 HIGH twins, not the source's 16 bits: --reference SOURCE has"]
    settings = ("tasks", "limit", "num_fewshot", "max_length", "apply_chat_template", "text_tokens", "length")
    report = {
        "verdict": overall(rows, means.get(args.modes[0], {}), args.modes[0]),
        "limit": LIMIT,
        "checkpoint": {
            "folder": bench.folder.resolve().name,
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
            **{name: getattr(args, name) for name in settings},
            "dtype": str(bench.pair.dtype).removeprefix("torch."),
            "memory": engine.config.memory,
            "policy": engine.config.policy,
        },
        "tasks": rows,
        "mean": means,
        "text": _text(texts),
        "ledger": {mode: _ledger(ledger) for mode, ledger in ledgers.items()} if texts else {},
        "not_measured": missing,
        "curve": _curve(bench.calibration),
        "versions": _versions(),
        "hardware": machine(bench.pair.device),
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
    commit = _git("describe", "--always", "--dirty", "--abbrev=12").strip()
    return {**found, "commit": commit} if commit else found


def _git(*arguments: str) -> str:
    """What git says of a checkout of this project; "" elsewhere."""
    root = TASKS.parent.parent
    if not (root / "pyproject.toml").is_file():
        return ""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    run(main)
