"""python -m apex_engine.eval CHECKPOINT: run lm-eval on the engine and on its reference, and report what changed.

reference          exact mode of the same checkpoint, or a model through transformers
each of --modes    the same items, the same seeds        ->  eval/delta.py  ->  eval/report/
"""

from __future__ import annotations

import argparse
import logging
import os
from importlib.util import find_spec
from pathlib import Path

from apex_engine.cli.console import program, quieten, run
from apex_engine.cli.options import add_engine_options
from apex_engine.config import MODES
from apex_engine.errors import ApexError, flag
from apex_engine.eval.options import add_pair_options


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=program("eval"),
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
    from apex_engine.eval.evaluation import evaluate  # torch, transformers, lm-eval, which --help does without

    print(evaluate(args))


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


if __name__ == "__main__":
    run(main)
