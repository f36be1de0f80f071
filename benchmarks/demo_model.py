"""python -m benchmarks.demo_model: what the twins and modes cost on the bundled model, as the table in docs/demo-model.md."""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

import apex_engine
from apex_engine.command import console, run
from apex_engine.config import Config
from apex_engine.eval.perplexity import decoded_logits, score, window_logits
from apex_engine.eval.texts import CODE_MODULES, domains, windows
from apex_engine.quantize.convert import Options, convert
from apex_engine.quantize.source import Source, resolve
from benchmarks.machine import machine

TWINS = {
    "clip": Options(),
    "hqq": Options(low_method="hqq"),
    "clip, 3-bit down": Options(low_down=3),
    "int8": Options(high="int8"),
}
# name -> twins, run-time options, one token at a time
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "all HIGH, 16-bit (`exact`)": ("clip", {"mode": "exact", "memory": "100%"}, False),
    "all HIGH, int8 (`exact`)": ("int8", {"mode": "exact", "memory": "100%"}, False),
    "`adaptive`, 50 % resident": ("clip", {"memory": "50%"}, True),
    "`adaptive`, 25 % resident": ("clip", {"memory": "25%"}, True),
    "`deterministic`": ("clip", {"mode": "deterministic", "memory": "100%"}, False),
    "all LOW, hqq": ("hqq", {"mode": "deterministic", "t1": -1.0, "t2": 1.0}, False),
    "all LOW, clip": ("clip", {"mode": "deterministic", "t1": -1.0, "t2": 1.0}, False),
    "all LOW, clip, 3-bit down": ("clip, 3-bit down", {"mode": "deterministic", "t1": -1.0, "t2": 1.0}, False),
}


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.demo_model", description=__doc__)
    p.add_argument("--windows", type=int, default=16, help="windows a domain; default: %(default)s")
    p.add_argument("--length", type=int, default=256, help="tokens a window; default: %(default)s")
    p.add_argument("--repeats", type=int, default=7, help="interleaved timings of each; default: %(default)s")
    p.add_argument("-o", "--output", type=Path, help="write the Markdown there instead of to stdout")
    args = p.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        text = report(Path(scratch), args)
    if args.output:
        args.output.write_text(text)
    else:
        print(text)


def report(scratch: Path, args: argparse.Namespace) -> str:
    source = resolve("tiny")
    folders = {name: scratch / str(i) for i, name in enumerate(TWINS)}
    bits = {}
    for name, options in TWINS.items():
        manifest, _ = convert("tiny", Source(source), folders[name], options, lambda n: None)
        bits[name] = manifest.low.bits_per_weight
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = {name: windows(tokenizer, text, args.windows, args.length) for name, text in domains(source).items()}
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    truth = {name: window_logits(reference, rows) for name, rows in texts.items()}
    base = {name: score(reference, rows, truth[name], lambda *_, n=name: truth[n]) for name, rows in texts.items()}

    head = " | ".join(f"{name}: perplexity | change | KL" for name in texts)
    lines = [
        f"| | {head} | calls LOW / skipped |",
        "|---|" + "---:|" * (3 * len(texts) + 1),
        "| transformers | " + " | ".join(f"{base[n].perplexity:.2f} | | " for n in texts) + " | |",
    ]
    for label, (twins, options, stepwise) in track(RUNS.items(), "scoring", console=console):
        model = apex_engine.load(folders[twins], dtype=torch.float32, **options)
        cells = []
        for name, rows in texts.items():
            found = score(model, rows, truth[name], decoded_logits if stepwise else window_logits)
            cells.append(
                f"{found.perplexity:.2f} | {found.perplexity / base[name].perplexity - 1:+.2%} | {found.kl:z.4f}"
            )
        share = model.apex.stats()["share_of_calls"]
        note = f" ({bits[twins]:.2f} bits)" if label.startswith("all LOW") else ""
        lines.append(f"| {label}{note} | " + " | ".join(cells) + f" | {share['low']:.1%} / {share['skip']:.1%} |")
        model.apex.close()
    return TEMPLATE.format(
        windows=args.windows,
        length=args.length,
        modules=", ".join(CODE_MODULES),
        python=platform.python_version(),
        table="\n".join(lines),
        routing="\n".join(routing(reference, torch.cat(list(texts.values())))),
        speed="\n".join(speed(source, folders["clip"], args.repeats)),
        repeats=args.repeats,
        machine=machine(),
        config=Config(),
    )


@torch.no_grad()
def routing(model: PreTrainedModel, rows: Tensor) -> list[str]:
    """What the routers of a Mixtral do on `rows` `[W, N]`, layer by layer."""
    gates = [layer.mlp.gate for layer in model.model.layers]
    seen: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in gates]  # router input, gate weights, choice
    for record, gate in zip(seen, gates, strict=True):
        gate.register_forward_hook(
            lambda _, args, out, record=record: record.append((args[0].flatten(0, -2), *out[1:]))
        )
    for row in rows:
        model(row[None], use_cache=False)
    lines = [
        "| layer | shared with the previous token | second gate < .1 | < .4 | largest share of one expert | next layer found |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for i, record in enumerate(seen):
        inputs, weights, chosen = (torch.stack(part) for part in zip(*record, strict=True))  # [W, N, ...]
        shared = _overlap(chosen[:, 1:], chosen[:, :-1])
        second = weights.min(-1).values
        share = torch.bincount(chosen.flatten()).max().item() / chosen.numel()
        cells = [
            f"{shared:.2f}",
            f"{(second < 0.1).float().mean():.0%}",
            f"{(second < 0.4).float().mean():.0%}",
            f"{share:.2f}",
        ]
        if i + 1 < len(gates):
            guess = (inputs @ gates[i + 1].weight.T).topk(chosen.shape[-1]).indices
            actual = torch.stack([choice for _, _, choice in seen[i + 1]])
            cells.append(f"{_overlap(actual, guess):.2f}")
        lines.append(f"| {i} | " + " | ".join(cells + [""] * (5 - len(cells))) + " |")
    return lines


def _overlap(a: Tensor, b: Tensor) -> float:
    """Share of the experts in `a` `[..., K]` that are in `b` `[..., K]` too."""
    return (a[..., :, None] == b[..., None, :]).any(-1).float().mean().item()


def speed(source: Path, folder: Path, repeats: int) -> list[str]:
    """Decode speed with everything resident beside transformers', in turns."""
    runs = {
        "`exact`": {"mode": "exact"},
        "`deterministic`": {"mode": "deterministic"},
        "all LOW": {"mode": "deterministic", "t1": -1.0, "t2": 1.0},
    }
    models = {}
    for dtype in (torch.bfloat16, torch.float32):
        word = str(dtype).removeprefix("torch.")
        models[f"{word}: transformers"] = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        for name, options in runs.items():
            models[f"{word}: engine, {name}"] = apex_engine.load(folder, dtype=dtype, memory="200%", **options)
    prompt = AutoTokenizer.from_pretrained(source)("And it came to pass", return_tensors="pt")
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in track(range(repeats + 1), "timing", console=console):
        for name, model in models.items():
            start = time.perf_counter()
            out = model.generate(**prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False)
            if turn:  # the first is a warm-up, and loads the experts
                times[name].append((out.shape[1] - prompt["input_ids"].shape[1]) / (time.perf_counter() - start))
    lines = ["| everything resident | tokens/s | of transformers |", "|---|---:|---:|"]
    for name, rates in times.items():
        base = times[f"{name.split(':')[0]}: transformers"]
        ratio = statistics.median(a / b for a, b in zip(rates, base, strict=True))
        lines.append(f"| {name} | {statistics.median(rates):.0f} | {ratio:.2f} |")
    return lines


TEMPLATE = """# What the trade costs on the bundled model

Made by `python -m benchmarks.demo_model -o docs/demo-model.md`. Perplexity on held-out text in {windows} windows of {length}
tokens a domain, spread over the whole text; KL(transformers || engine) in nats a token; float32 computation. `kjv` is
Revelation, `drama` Macbeth, `code` the source of {modules} in the standard library of Python {python}.
Thresholds T1 {config.t1:g} (first MoE layer {config.first_t1:g}), T2 {config.t2:g}.
The adaptive rows are decoded token by token, since a whole window in one pass serves nearly every expert HIGH (some token
wants it); the others give the same in any grouping of the tokens.

{table}

## Routing

On the same windows, as the model card describes it. "Next layer found": share of the next layer's experts that its router
picks when given this layer's router input.

{routing}

## Speed

One prompt, 64 new tokens, greedy; median of {repeats} runs in turns; the ratio is the median of the pairs. In `exact` and
`deterministic` mode with 16-bit activations the engine keeps torch's own sums for HIGH twins, so that tokens do not depend on the
order of a sum.

{speed}

Machine: {machine}.
"""

if __name__ == "__main__":
    run(main)
