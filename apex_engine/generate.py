"""python -m apex_engine.generate [MODEL] [PROMPT]: text from an apex checkpoint, under a memory budget, with its ledger."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, TextStreamer, set_seed

from apex_engine.checkpoint.calibration import resolve
from apex_engine.cli.console import console, quieten, run, say
from apex_engine.cli.options import add_engine_options, engine_config, open_checkpoint, read_tokenizer
from apex_engine.config import Config
from apex_engine.core.vocabulary import Words
from apex_engine.errors import ApexError, check_seed, first_line, flag, human
from apex_engine.memory.plan import Plan, plan_model
from apex_engine.memory.probe import parse_device
from apex_engine.quantize.source.names import ALIASES
from apex_engine.runtime.hook import load, read_config

ADAPTIVE = (
    "adaptive mode alters precision: missing experts of little gate weight come as INT2 or are skipped "
    "(--mode exact forbids it)"
)
DEMO_PROMPT = "Rev3:1 And I saw a great"
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
        prog="python -m apex_engine.generate",
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


def main() -> None:
    args = parser().parse_args()
    device = parse_device(args.device)
    config = engine_config(args, device)
    sampling = _sampling(args)
    quieten()
    prompt = _prompt(args)
    folder, manifest = open_checkpoint(args.model)
    model_config = read_config(folder)
    tokenizer = read_tokenizer(folder)
    ids = _encode(tokenizer, prompt, args.raw)
    context = _check_length(model_config, ids.shape[1], args.max_new_tokens)
    config = replace(config, context=context)
    dtype = (model_config.dtype or torch.float32) if args.dtype == "auto" else getattr(torch, args.dtype)
    thresholds = resolve(config, folder, manifest)
    plan = plan_model(config, manifest, model_config, dtype.itemsize, thresholds.calibrated)
    if args.stats == "table":
        show_plan(plan, config, manifest.words)
        if config.mode != "exact":
            say(f"thresholds: {thresholds.origin}")
    if args.stats != "json" and config.mode == "adaptive":
        say(ADAPTIVE)

    model = load(folder, dtype=None if args.dtype == "auto" else args.dtype, device=device, **vars(config))
    set_seed(args.seed)
    inputs = ids.to(device)
    try:
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
            max_new_tokens=args.max_new_tokens,
            do_sample=args.do_sample,
            **sampling,
        )
    except KeyboardInterrupt:
        print(flush=True)  # the text so far has no end of line
        raise
    finally:  # after Ctrl-C too: what was done so far
        show_stats(model, args.stats)


def _prompt(args: argparse.Namespace) -> str:
    """From the argument, the file or stdin; one newline at the end, as editors and `echo` write it, is not part of it."""
    if args.prompt is not None and args.file:
        raise ApexError("two prompts: give it as an argument or with --file, not both")
    try:
        if args.file:
            text = args.file.read_text().removesuffix("\n")
        elif args.prompt == "-" or (args.prompt is None and args.model and sys.stdin and not sys.stdin.isatty()):
            text = sys.stdin.read().removesuffix("\n") if sys.stdin else ""
        elif args.prompt is None and not args.model:
            text = DEMO_PROMPT
        else:
            text = args.prompt or ""
        text.encode()
    except (OSError, UnicodeError) as error:
        raise ApexError(f"the prompt cannot be read as UTF-8 text: {error}") from None
    if not text and args.model and not Path(args.model).exists() and args.model not in ALIASES:
        raise ApexError(f"{args.model} is no directory, and there is no prompt: give a checkpoint, then the prompt")
    if not text:
        raise ApexError("no prompt: give it as the second argument, with --file, or on stdin")
    return text


def _encode(tokenizer: Any, text: str, raw: bool) -> torch.Tensor:
    """Token ids `[1, N]`."""
    if tokenizer.chat_template and not raw:
        turn = [{"role": "user", "content": text}]
        try:
            encoded = tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # templates are programs
            raise ApexError(f"the chat template failed ({first_line(error)}): --raw goes without it") from None
    else:
        encoded = tokenizer(text, return_tensors="pt")
    return encoded["input_ids"]


def _check_length(config: Any, prompt: int, new: int) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if new < 1:
        raise ApexError(f"--max-new-tokens {new}: at least 1")
    if not prompt:
        raise ApexError("the prompt has no tokens")
    if limit and prompt + new > limit:
        raise ApexError(
            f"{prompt} tokens of prompt and {new} new ones are more than the model's {limit} positions: shorten the prompt or "
            "lower --max-new-tokens"
        )
    return prompt + new


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
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


def show_plan(plan: Plan, config: Config, words: Words) -> None:
    """What will be held in memory, before anything is loaded."""
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
    for precision, slots in plan.slots.items():
        what = f"{slots} of {plan.experts} experts ({slots / plan.experts:.0%}), {human(plan.stride[precision])} each"
        table.add_row(f"{words[precision].upper()} slots", human(slots * plan.stride[precision]), what)
    for precision, slots in plan.host_slots.items():
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


def show_stats(model: PreTrainedModel, how: str) -> None:
    """The ledger on stderr: "table", "json" or "none"."""
    stats = model.apex.stats()
    if how == "json":
        print(json.dumps(stats), file=sys.stderr)
    if how != "table":
        return
    table = Table(title="ledger", title_justify="left")
    table.add_column("")
    for column in ("HIGH", "LOW", "skipped"):
        table.add_column(column, justify="right")
    words = ("high", "low", "skip")
    table.add_row("expert calls", *(f"{stats['calls'][w]:,}" for w in words))
    table.add_row("share of calls", *(_percent(stats["share_of_calls"][w]) for w in words))
    table.add_row("share of gate mass", *(_percent(stats["share_of_gate_mass"][w]) for w in words))
    table.add_row("by the score alone", *(f"{stats['asked'][w]:,}" for w in words))
    table.add_row("hit rate (uses a layer step)", *(_percent(stats["hit_rate"][w]) for w in words[:2]), "")
    table.add_row("loads", *(f"{stats['loads'][w]:,}" for w in words[:2]), "")
    table.add_row("read", *(human(stats["bytes_read"][w]) for w in words[:2]), "")
    console.print(table)
    seconds, tokens = stats["seconds"], stats["tokens"]
    for phase in ("prefill", "decode"):
        rate = stats["tokens_per_second"][phase]
        say(f"{phase}: {tokens[phase]} tokens in {seconds[phase]:.2f} s" + (f", {rate:.1f} tokens/s" if rate else ""))
    say(
        f"time: {seconds['stall']:.2f} s waiting for experts, {seconds['compute']:.2f} s computing them, "
        f"{seconds['rest']:.2f} s elsewhere"
    )
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


if __name__ == "__main__":
    run(main)
