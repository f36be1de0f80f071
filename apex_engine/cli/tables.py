"""The plan before a model is loaded and the ledger after its run, as tables on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.table import Table

from apex_engine.cli.console import console, say
from apex_engine.config import Config
from apex_engine.core.vocabulary import Words
from apex_engine.errors import human
from apex_engine.memory.plan import Plan


def show_plan(plan: Plan, config: Config, words: Words) -> None:
    """What will be held in memory, before anything is loaded. `words`: of the precisions."""
    ahead = f"prefetch {config.prefetch} layers ahead" if config.prefetch else "no prefetch"
    title = f"plan: mode {config.mode}, policy {config.policy}, {ahead}, prompts {config.admission}"
    table = Table(title=title, title_justify="left")
    for column in ("in memory", "bytes", "what"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    table.add_row("dense weights", human(plan.dense_bytes), "attention, norms, routers, embeddings")
    table.add_row(
        "KV cache", "unknown" if plan.kv_bytes is None else human(plan.kv_bytes), f"{config.context} tokens at most"
    )
    table.add_row(
        "step outputs", human(plan.step_bytes), "of a layer's chosen experts, before they are summed, at most"
    )
    for precision, slots in sorted(plan.slots.items(), reverse=True):
        what = f"{slots} of {plan.experts} experts ({slots / plan.experts:.0%}), {human(plan.stride[precision])} each"
        table.add_row(f"{words[precision].upper()} slots", human(slots * plan.stride[precision]), what)
    for precision, slots in sorted(plan.host_slots.items(), reverse=True):
        what = f"{slots} of {plan.experts} experts, in host memory"
        table.add_row(f"{words[precision].upper()}, host tier", human(slots * plan.stride[precision]), what)
    console.print(table)
    all_high = plan.experts * plan.stride[plan.top]
    share = (
        f"as much as {plan.budget / all_high:.0%} of all HIGH twins" if plan.budget < 10 * all_high else "more than all"
    )
    say(f"budget for experts {human(plan.budget)} ({share}), {human(plan.slot_bytes)} in slots")
    if config.mode == "adaptive" and plan.budget >= all_high:
        say(f"all HIGH twins take {human(all_high)}, which fits: --mode exact needs no more and alters nothing")


def show_stats(stats: dict[str, Any], how: str) -> None:
    """`Engine.stats()` on stderr: "table", "json" or "none"."""
    if how == "json":
        print(json.dumps(stats), file=sys.stderr)
    if how != "table":
        return
    table = Table(title="ledger", title_justify="left")
    table.add_column("")
    words = list(stats["share_of_calls"])  # highest first
    twins = [word for word in words if word != "skip"]
    for column in (*(word.upper() for word in twins), "skipped"):
        table.add_column(column, justify="right")
    table.add_row("expert calls", *(f"{stats['calls'][w]:,}" for w in words))
    table.add_row("share of calls", *(_percent(stats["share_of_calls"][w]) for w in words))
    table.add_row("share of gate mass", *(_percent(stats["share_of_gate_mass"][w]) for w in words))
    table.add_row("by the score alone", *(f"{stats['asked'][w]:,}" for w in words))
    table.add_row("hit rate (uses a layer step)", *(_percent(stats["hit_rate"][w]) for w in twins), "")
    table.add_row("loads", *(f"{stats['loads'][w]:,}" for w in twins), "")
    table.add_row("read", *(human(stats["bytes_read"][w]) for w in twins), "")
    console.print(table)
    _show_times(stats)
    _show_notes(stats)


def _show_times(stats: dict[str, Any]) -> None:
    seconds, tokens = stats["seconds"], stats["tokens"]
    for phase in ("prefill", "decode"):
        rate = stats["tokens_per_second"][phase]
        say(f"{phase}: {tokens[phase]} tokens in {seconds[phase]:.2f} s" + (f", {rate:.1f} tokens/s" if rate else ""))
    say(
        f"time: {seconds['stall']:.2f} s waiting for experts, {seconds['compute']:.2f} s computing them, "
        f"{seconds['rest']:.2f} s elsewhere"
    )


def _show_notes(stats: dict[str, Any]) -> None:
    """What was prefetched, what went wrong, and what computed."""
    early = stats["prefetch"]
    if early["bytes"]:
        say(
            f"prefetch: {human(early['bytes'])}, {human(early['wasted_bytes'])} of them in vain; "
            f"{_percent(early['coverage'])} of what was missing; next layer's experts right: "
            f"{_percent(early['top1_right'])} the first, {_percent(early['all_right'])} all"
        )
    if early["failed"]:
        say(f"note: {early['failed']} prefetches failed to read")
    if stats["calls"]["degraded"]:
        say(f"degraded: {stats['calls']['degraded']:,} calls wanted HIGH and were served LOW (--upgrade async)")
    if stats["layers_not_predicted"]:
        say(f"note: no predictions for MoE layers {stats['layers_not_predicted']}: their routers are of another kind")
    say("kernels: " + ", ".join(f"{name} for {word.upper()}" for word, name in stats["kernels"].items()))
    if not stats["reads_bypass_page_cache"]:
        say("note: this file system has no O_DIRECT, so reads may have come from the page cache")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
