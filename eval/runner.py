"""lm-eval's tasks, asked of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from apex_engine.errors import ApexError, first_line
from apex_engine.eval.bench import REFERENCE, Bench
from apex_engine.eval.identity import identity
from apex_engine.eval.lm import EngineLM

TASKS = Path(__file__).resolve().parent / "tasks"  # ours, beside lm-eval's own


def task_manager(tasks: list[str], include_path: Path | None) -> TaskManager:
    """lm-eval's, with our tasks and those in `include_path`; it knows all of `tasks`. Raises ApexError."""
    folders = [str(folder) for folder in (TASKS, include_path) if folder]
    for defaults in (False, True):  # lm-eval's own are thousands: they are read only where they are needed
        manager = TaskManager(include_path=folders, include_defaults=defaults)
        unknown = [name for name in tasks if name not in manager.all_tasks]
        if not unknown:
            return manager
    raise ApexError(f"lm-eval has no task {', '.join(unknown)}: `lm_eval ls tasks` lists its own, apex_demo is ours")


def run_tasks(bench: Bench, who: str, tokenizer: Any, manager: TaskManager, cache: Path) -> dict[str, Any]:
    """lm-eval's result with samples. Answers are kept in the folder `cache` as they come, and not asked for again."""
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
            use_cache=str(cache / f"{who}-{identity(bench, who)}"),
            log_samples=True,
            bootstrap_iters=0,  # the errors that count are those of the differences
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise ApexError(
            f"the data of {args.tasks} cannot be had ({first_line(error)}): apex_demo needs no network"
        ) from None
    return found
