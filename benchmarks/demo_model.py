"""python -m benchmarks.demo_model: what the twins and modes cost on the bundled model, as the table in docs/demo-model.md."""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import apex_engine
from apex_engine.calibration.measure import calibrate
from apex_engine.calibration.settings import Settings
from apex_engine.checkpoint.moments import Moments
from apex_engine.cli.console import console, quieten, run
from apex_engine.core.thresholds import DEFAULTS
from apex_engine.eval.machine import machine
from apex_engine.eval.perplexity import Comparison, decoded_logits, judge, window_logits
from apex_engine.eval.texts import CODE_MODULES, domains, windows
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import resolve
from benchmarks.twins import LIMIT
from benchmarks.twins import settings as calibration_of

# name -> options, whether made with the second moments of the "clip" twins' inputs
TWINS = {
    "clip": (Options(), False),
    "hqq": (Options(low_method="hqq"), False),
    "clip, importance": (Options(), True),
    "gptq, importance": (Options(low_method="gptq"), True),
    "clip, 3-bit down": (Options(low_down=3), False),
    "gptq, importance, 3-bit down": (Options(low_method="gptq", low_down=3), True),
    "int8": (Options(high="int8"), False),
}
CALIBRATED = "gptq, importance"
UNCALIBRATED = dict(zip(("t1", "t2", "first_t1"), DEFAULTS["calibrated"], strict=True))
ALL_LOW = {"mode": "deterministic", "t1": -1.0, "t2": 1.0}
# name -> twins, run-time options, one token at a time
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "all HIGH, 16-bit (`exact`)": ("clip", {"mode": "exact", "memory": "100%"}, False),
    "all HIGH, int8 (`exact`)": ("int8", {"mode": "exact", "memory": "100%"}, False),
    "`deterministic`, clip, not calibrated": ("clip", {"mode": "deterministic", **UNCALIBRATED}, False),
    f"`deterministic`, {CALIBRATED}, same thresholds": (CALIBRATED, {"mode": "deterministic", **UNCALIBRATED}, False),
    f"`deterministic`, {CALIBRATED}, calibrated": (CALIBRATED, {"mode": "deterministic"}, False),
    f"`adaptive`, 50 % resident, {CALIBRATED}, calibrated": (CALIBRATED, {"memory": "50%"}, True),
    f"`adaptive`, 25 % resident, {CALIBRATED}, calibrated": (CALIBRATED, {"memory": "25%"}, True),
    **{f"all LOW, {name}": (name, ALL_LOW, False) for name in TWINS if name != "int8"},
}


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.demo_model", description=__doc__)
    p.add_argument("--model", default="tiny", help="a Mixtral with texts in text/; default: the bundled model")
    p.add_argument("--windows", type=int, default=16, help="windows a domain; default: %(default)s")
    p.add_argument("--length", type=int, default=256, help="tokens a window; default: %(default)s")
    p.add_argument("--tokens", type=int, default=64, help="new ones of each timing; default: %(default)s")
    p.add_argument("--repeats", type=int, default=7, help="interleaved timings of each; default: %(default)s")
    p.add_argument("--calibration-tokens", type=int, default=Settings.tokens, help="of text; default: %(default)s")
    p.add_argument("-o", "--output", type=Path, help="write the Markdown there instead of to stdout")
    args = p.parse_args(arguments)
    quieten()
    with tempfile.TemporaryDirectory() as scratch:
        text = report(Path(scratch), args)
    if args.output:
        args.output.write_text(text)
    else:
        print(text)


def report(scratch: Path, args: argparse.Namespace) -> str:
    source, settings = resolve(args.model), calibration_of(args.calibration_tokens)
    folders = {name: scratch / str(i) for i, name in enumerate(TWINS)}
    bits = {}
    moments = None
    for name, (options, important) in TWINS.items():
        if important and moments is None:
            calibrate(folders["clip"], LIMIT, settings)
            moments = Moments(folders["clip"])
        if important and moments:
            options = replace(options, importance=moments.identity)
        used = moments if important else None
        manifest, _ = convert(args.model, Source(source), folders[name], options, lambda n: None, used)
        bits[name] = manifest.layout(1).bits_per_weight
    content = calibrate(folders[CALIBRATED], LIMIT, settings)
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = {name: windows(tokenizer, text, args.windows, args.length) for name, text in domains(source).items()}
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    truth = {name: window_logits(reference, rows) for name, rows in texts.items()}
    base = {name: judge(rows, truth[name], truth[name]) for name, rows in texts.items()}

    head = " | ".join(f"{name}: perplexity | change | KL" for name in texts)
    lines = [
        f"| | {head} | mean: change | KL | calls LOW / skipped |",
        "|---|" + "---:|" * (3 * len(texts) + 3),
        "| transformers | " + " | ".join(f"{base[n].perplexity:.2f} | | " for n in texts) + " | | | |",
    ]
    for label, (twins, options, stepwise) in track(RUNS.items(), "scoring", console=console):
        model = apex_engine.load(folders[twins], dtype=torch.float32, **options)
        cells, parts = [], []
        for name, rows in texts.items():
            found = judge(rows, truth[name], (decoded_logits if stepwise else window_logits)(model, rows))
            cells.append(f"{found.perplexity:.2f} | {found.change:+.2%} | {found.kl.mean():z.4f}")
            parts.append(found)
        share = model.apex.stats()["share_of_calls"]
        note = f" ({bits[twins]:.2f} bits)" if label.startswith("all LOW") else ""
        mean = f"{statistics.fmean(p.change for p in parts):+.2%} | {Comparison.joined(parts).kl.mean():z.4f}"
        cells += [mean, f"{share['low']:.1%} / {share['skip']:.1%}"]
        lines.append(f"| {label}{note} | " + " | ".join(cells) + " |")
        model.apex.close()
    return TEMPLATE.format(
        windows=args.windows,
        length=args.length,
        modules=", ".join(CODE_MODULES),
        python=platform.python_version(),
        table="\n".join(lines),
        routing="\n".join(routing(reference, torch.cat(list(texts.values())))),
        speed="\n".join(speed(source, folders["clip"], args.tokens, args.repeats)),
        new=args.tokens,
        repeats=args.repeats,
        machine=machine(),
        curve="\n".join(curve(content)),
        thresholds="\n".join(thresholds(content)),
        limit=LIMIT,
        tokens=settings.tokens,
        calibrated=CALIBRATED,
        uncalibrated=", ".join(f"{name} {value:g}" for name, value in UNCALIBRATED.items()),
    )


def curve(content: dict[str, Any]) -> list[str]:
    """The calibration's trade-off, as it was measured on its own text."""
    lines = ["| KL | perplexity | calls LOW | skipped | gate mass LOW |", "|---:|---:|---:|---:|---:|"]
    for point in content["curve"]:
        shares = [f"{point[name]:.1%}" for name in ("share_low", "share_skip", "gate_mass_low")]
        lines.append("| " + " | ".join([f"{point['kl']:.4f}", f"{point['change']:+.2%}", *shares]) + " |")
    return lines


def thresholds(content: dict[str, Any]) -> list[str]:
    lines = ["| layer | T1 | T2 | KL if all its experts are LOW |", "|---:|---:|---:|---:|"]
    rows = zip(*content["thresholds"].values(), content["layers"]["kl_all_low"], strict=True)
    for i, (t1, t2, kl) in enumerate(rows):
        lines.append(f"| {i} | {'all LOW' if t1 < 0 else f'{t1:.2f}'} | {t2:.2f} | {kl:.4f} |")
    return lines


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


def speed(source: Path, folder: Path, new: int, repeats: int) -> list[str]:
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
            out = model.generate(**prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
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
The thresholds that are not calibrated are {uncalibrated}. LOW twins with importance are made
with `--importance`, from second moments of the experts' inputs on text that the model wrote itself: nothing here was calibrated
on the text it is measured on. Bits are real ones, with scales, zeros and padding.

Windows go through in one pass, but for the adaptive rows: those are decoded token by token, since a whole window in one pass
serves nearly every expert HIGH (some token wants it); the others give the same in any grouping of the tokens.

{table}

## Calibration

`python -m apex_engine.calibrate` on the {calibrated} twins, for {limit}, on {tokens:,} tokens that the model wrote itself, at
temperature 1. The trade-off, on 16 windows of that text:

{curve}

The thresholds, and what is lost where all experts of one layer alone are LOW:

{thresholds}

## Routing

On the same windows, as the model card describes it. "Next layer found": share of the next layer's experts that its router
picks when given this layer's router input.

{routing}

## Speed

One prompt, {new} new tokens, greedy; median of {repeats} runs in turns; the ratio is the median of the pairs. In `exact` and
`deterministic` mode with 16-bit activations the engine keeps torch's own sums for HIGH twins, so that tokens do not depend on the
order of a sum.

{speed}

Machine: {machine}.
"""

if __name__ == "__main__":
    run(main)
