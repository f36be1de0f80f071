"""One evaluation from the checkpoint to the report: tasks and texts, on the reference and on the engine in each mode."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from apex_engine.checkpoint.atomic import check_writable
from apex_engine.checkpoint.calibration import read_calibration
from apex_engine.cli.checkpoint import open_checkpoint, read_tokenizer
from apex_engine.cli.console import say
from apex_engine.core.ledger import Ledger
from apex_engine.errors import ApexError
from apex_engine.eval.bench import REFERENCE, Bench
from apex_engine.eval.delta import task_rows
from apex_engine.eval.pair import load_pair, read_windows
from apex_engine.eval.report.contents import Measured, make_report
from apex_engine.eval.report.files import write
from apex_engine.eval.report.sections import headline
from apex_engine.eval.runner import run_tasks, task_manager


def evaluate(args: argparse.Namespace) -> str:
    """Writes the report and returns its headline; `args` are those of the command. Raises ApexError, for what can be refused
    before the hours of work."""
    folder, manifest = open_checkpoint(args.model)
    tokenizer = read_tokenizer(folder)
    if args.apply_chat_template and not tokenizer.chat_template:
        raise ApexError(f"the tokenizer of {folder} has no chat template: drop --apply-chat-template")
    calibration = read_calibration(folder, manifest)
    windows, missing = read_windows(args.text, manifest, tokenizer, args.text_tokens, args.length, args.length)
    manager = task_manager(args.tasks.split(","), args.include_path)
    output = args.output or Path("reports") / f"{folder.resolve().name}-{args.tasks.replace(',', '-')}"
    check_writable(output / "report.md")
    bench = Bench(args, folder, manifest, load_pair(args, folder, args.reference), calibration)
    results, seconds = {}, {}
    for who in (REFERENCE, *args.modes):
        say(f"{who}: {args.tasks}")
        start = time.perf_counter()
        results[who] = run_tasks(bench, who, tokenizer, manager, output / "cache")
        seconds[who] = time.perf_counter() - start
    rows, skipped = task_rows(results[REFERENCE], {mode: results[mode] for mode in args.modes})
    ledgers = {mode: Ledger(manifest.words) for mode in args.modes}
    texts = {}
    for name, some in windows.items():
        say(f"{name}: {len(some)} windows of {args.length} tokens")
        texts[name] = bench.pair.compare(some, ledgers)
    report = make_report(bench, Measured(rows, texts, ledgers, missing + skipped, seconds))
    say(f"written to {', '.join(map(str, write(report, output)))}")
    return headline(report)
