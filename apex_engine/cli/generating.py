"""Generation from an apex checkpoint: the plan, the text as it comes, the ledger."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from transformers import TextStreamer, set_seed

from apex_engine.checkpoint.calibration import resolve
from apex_engine.cli.checkpoint import open_checkpoint, read_tokenizer
from apex_engine.cli.console import loading_bars, quieten, say
from apex_engine.cli.options import engine_config
from apex_engine.cli.prompts import encode, read_prompt
from apex_engine.cli.tables import show_plan, show_stats
from apex_engine.errors import ApexError
from apex_engine.memory.plan import plan_model
from apex_engine.memory.probe import parse_device
from apex_engine.runtime.hook import load, read_config

ADAPTIVE = (
    "adaptive mode alters precision: missing experts of little gate weight come as INT2 or are skipped "
    "(--mode exact forbids it)"
)


def generate(args: argparse.Namespace, sampling: dict[str, Any]) -> None:
    """What `apex_engine.generate` does with its arguments; `sampling` are those for transformers. Raises ApexError."""
    device = parse_device(args.device)
    config = engine_config(args, device)
    quieten()
    prompt = read_prompt(args)
    folder, manifest = open_checkpoint(args.model)
    model_config = read_config(folder)
    tokenizer = read_tokenizer(folder)
    ids = encode(tokenizer, prompt, args.raw)
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

    kind = None if args.dtype == "auto" else args.dtype
    with loading_bars() as told:
        model = load(folder, dtype=kind, device=device, progress=told, **vars(config))
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
        show_stats(model.apex.stats(), args.stats)


def _check_length(config: Any, prompt: int, new: int) -> int:
    """Tokens in all. Raises ApexError for more than the model has positions."""
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
