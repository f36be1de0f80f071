"""One configuration of the engine on texts: seconds, bytes and hits of every token, KL to the reference."""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

import apex_engine
from apex_engine.cli.console import console
from apex_engine.runtime.engine import Engine


@dataclass
class Run:
    """One configuration's windows: seconds, counts and KL."""

    first: list[float] = field(default_factory=list)  # seconds to the first token
    decode: list[float] = field(default_factory=list)  # seconds a token
    stall: list[float] = field(default_factory=list)  # seconds a token
    nbytes: list[float] = field(default_factory=list)  # bytes a token
    hits: list[float] = field(default_factory=list)  # share of uses
    link: list[float] = field(default_factory=list)  # share of the time
    busy: list[float] = field(default_factory=list)  # share of the stalls with something on its way
    kl: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


def measure(
    folders: dict[str, Path], options: dict[str, dict[str, Any]], texts: Tensor, truth: Tensor, args: argparse.Namespace
) -> dict[str, Run]:
    """Every configuration on every text, in turns; each keeps its experts from text to text."""
    models = {name: load(folders[name], args, **some) for name, some in options.items()}
    runs = {name: Run() for name in models}
    order = list(models)
    for i, row in enumerate(track(texts, "decoding", console=console)):
        for name in order[i % len(order) :] + order[: i % len(order)]:
            one_text(models[name], row, truth[i], args.prompt, runs[name])
    for model in models.values():
        model.apex.check_integrity()
        model.apex.close()
    return runs


def load(folder: Path, args: argparse.Namespace, **options: Any) -> PreTrainedModel:
    """Behind a simulated link all experts are in host memory. Without one they come from the disk: a host tier has no place."""
    host = "100%" if options.get("link") else 0
    return apex_engine.load(folder, dtype=torch.float32, memory=args.memory, host_memory=host, **options)


@torch.no_grad()
def one_text(model: PreTrainedModel, row: Tensor, truth: Tensor | None, prompt: int, run: Run) -> None:
    """Prefill the first tokens of `row`, then go through the others one by one, whatever the model would say."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    past, logits = {name: DynamicCache(config=model.config)}, []
    start = time.perf_counter()
    model(row[None, :prompt], **past, use_cache=True)
    run.first.append(time.perf_counter() - start)
    model.apex.reset_stats()
    link = model.apex.link
    busy, start = link.busy_seconds if link else 0.0, time.perf_counter()
    for token in row[prompt:]:
        logits.append(model(token.view(1, 1), **past, use_cache=True).logits[0, 0])
    seconds, n = time.perf_counter() - start, len(row) - prompt
    record(model.apex, seconds, n, run)
    run.link.append((link.busy_seconds - busy) / seconds if link else 0.0)
    if truth is not None:
        found = torch.stack(logits).log_softmax(-1)
        run.kl.append((truth[prompt:].exp() * (truth[prompt:] - found)).sum(-1).mean().item())


def record(engine: Engine, seconds: float, tokens: int, run: Run) -> None:
    stats = engine.stats()
    uses = sum(stats["hits"].values()) + sum(stats["loads"].values())
    run.decode.append(seconds / tokens)
    run.stall.append(stats["seconds"]["stall"] / tokens)
    run.busy.append(stats["seconds"]["stall_while_loading"] / max(stats["seconds"]["stall"], 1e-9))
    run.nbytes.append(stats["bytes_read"]["total"] / tokens)
    run.hits.append(sum(stats["hits"].values()) / max(uses, 1))
    run.stats = stats


def summary(run: Run, rate: float) -> dict[str, float]:
    decode, stall, nbytes = (statistics.median(values) for values in (run.decode, run.stall, run.nbytes))
    compute = statistics.median(d - s for d, s in zip(run.decode, run.stall, strict=True))
    prefetch = run.stats["prefetch"]
    return {
        "tokens_per_second": 1 / decode,
        "first_token_seconds": statistics.median(run.first),
        "stall_share": stall / decode,
        "bytes_a_token": nbytes,
        "hit_rate": statistics.median(run.hits),
        "link_busy": statistics.median(run.link) if run.link else nbytes / rate / decode,
        "busy_while_stalled": statistics.median(run.busy),
        "of_the_bound": decode / max(compute, nbytes / rate),
        "kl": statistics.mean(run.kl) if run.kl else 0.0,
        "prefetch_wasted": prefetch["wasted_bytes"] / max(1, run.stats["bytes_read"]["total"]),
        "coverage": prefetch["coverage"] or 0.0,
        "decode_seconds": run.decode,  # type: ignore[dict-item]
    }


def gain(times: list[float], base: list[float]) -> float:
    """How many times as fast as `base`: the median of the texts' ratios."""
    return statistics.median(b / a for a, b in zip(times, base, strict=True))
