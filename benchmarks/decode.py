"""python -m benchmarks.decode: what each part of the runtime is worth, on the bundled model behind a simulated link."""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache

import apex_engine
from apex_engine.calibration.measure import calibrate as calibrate_thresholds
from apex_engine.calibration.search import Limit
from apex_engine.calibration.settings import Settings
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.checkpoint.moments import Moments
from apex_engine.cli.console import console, quieten, run, say
from apex_engine.config import Config
from apex_engine.core.ledger import TWINS
from apex_engine.core.vocabulary import ExpertId
from apex_engine.errors import ApexError
from apex_engine.eval.machine import machine
from apex_engine.eval.texts import domains, windows
from apex_engine.kernels.layout import ALIGN
from apex_engine.memory.loader import BLOCK, WORKERS
from apex_engine.memory.store import ExpertStore
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import resolve
from apex_engine.runtime.engine import Engine
from benchmarks.kernels import copy_bandwidth
from benchmarks.synthetic import SHAPES, Model, Trace, write_store

STEPS: dict[str, dict[str, Any]] = {
    "on-demand": {"system": "on-demand"},
    "+ dynamic precision": {"system": "on-demand", "mode": "adaptive"},
    "+ prefetch": {"system": "on-demand", "mode": "adaptive", "prefetch": 1},
    "+ policy": {"system": "on-demand", "mode": "adaptive", "prefetch": 1, "policy": "lcu"},
    "+ admission = default": {},
    "apex": {"system": "apex"},
    "floor": {"low_share": "floor"},
    "floor, upgrades async": {"low_share": "floor", "upgrade": "async"},
    "exact, prefetch": {"mode": "exact"},
    "default, gptq twins calibrated for KL .02": {},
}
CALIBRATED = list(STEPS)[-1]
SIDE_BY_SIDE = (
    ("+ dynamic precision", "on-demand"),
    ("+ prefetch", "+ dynamic precision"),
    ("+ admission = default", "apex"),
)
SPEEDS = (10, 3, 1, 0.3, 0.1)  # of the link, in the sweep
PROMPTS = (16, 512)


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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    p.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME", help="default: all")
    p.add_argument("--memory", default="25%", help="of all HIGH twins; default: 25%%")
    p.add_argument("--windows", type=int, default=4, help="texts a domain; default: %(default)s")
    p.add_argument("--prompt", type=int, default=32, help="tokens; default: %(default)s")
    p.add_argument("--tokens", type=int, default=64, help="to decode after each prompt; default: %(default)s")
    p.add_argument(
        "--loading", type=float, default=0.8, help="share of on-demand's time; sets the link; default: %(default)s"
    )
    p.add_argument("--synthetic", choices=SHAPES, help="a model of this shape, with random experts, read from the disk")
    p.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="for its experts; default: %(default)s"
    )
    p.add_argument("--repeats", type=int, default=3, help="of the synthetic runs, in turns; default: %(default)s")
    p.add_argument("--device", default="cpu", help="for the synthetic runs; default: %(default)s")
    p.add_argument("--host-memory", default="0", help="for the synthetic runs, between disk and device; default: none")
    p.add_argument(
        "--sweep", action="store_true", help="the default with and without prefetch at five speeds of the link"
    )
    p.add_argument("--prompts", action="store_true", help="hit rates of decoding after a short and a long prompt")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the time of a token there (.svg, .png)")
    p.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    return p.parse_args(arguments)


def main() -> None:
    args = parse()
    quieten()
    with tempfile.TemporaryDirectory(dir=args.folder if args.synthetic else None) as scratch:
        result = synthetic(Path(scratch), args) if args.synthetic else benchmark(Path(scratch), args)
    print(json.dumps(result, indent=1) if args.json else markdown(result))
    if args.plot and "runs" in result:
        plot(result, args.plot)


def benchmark(scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    source = resolve("tiny")
    convert("tiny", Source(source), scratch / "apex", Options(), lambda n: None)
    tokenizer = AutoTokenizer.from_pretrained(source)
    length = args.prompt + args.tokens
    texts = torch.cat([windows(tokenizer, text, args.windows, length) for text in domains(source).values()])
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        truth = torch.stack([reference(row[None], use_cache=False).logits[0].log_softmax(-1) for row in texts])
    link = calibrate(scratch / "apex", texts, args)
    result: dict[str, Any] = {"machine": machine(), "link": link, "memory": args.memory, "texts": len(texts)}
    result |= {"prompt": args.prompt, "tokens": args.tokens}
    text = f"{link['bytes_per_second']:.0f}B/s,20us"
    if args.sweep:
        result["sweep"] = sweep(scratch / "apex", texts, truth, link["bytes_per_second"], args)
    elif args.prompts:
        result["prompts"] = prompts(scratch / "apex", tokenizer, source, args)
    else:
        options = {name: {**STEPS[name], "link": text} for name in args.steps}
        folders = dict.fromkeys(options, scratch / "apex")
        if CALIBRATED in options:
            folders[CALIBRATED] = calibrated_twins(source, scratch)
        runs = measure(folders, options, texts, truth, args)
        result["runs"] = {name: summary(run, link["bytes_per_second"]) for name, run in runs.items()}
    return result


def calibrate(folder: Path, texts: Tensor, args: argparse.Namespace) -> dict[str, float]:
    """The link at which loading takes the share asked for of on-demand's time."""
    model = load(folder, args, system="on-demand")
    run = Run()
    for row in texts:
        one_text(model, row, None, args.prompt, run)
    model.apex.close()
    compute = statistics.median(d - s for d, s in zip(run.decode, run.stall, strict=True))
    nbytes = statistics.median(run.nbytes)
    rate = nbytes / (compute * args.loading / (1 - args.loading))
    return {"bytes_per_second": rate, "compute_seconds": compute, "bytes": nbytes}


def calibrated_twins(source: Path, scratch: Path) -> Path:
    """Twins made with what a calibration recorded, calibrated themselves."""
    for name in ("plain", "better"):
        moments = Moments(scratch / "plain") if name == "better" else None
        options = Options(low_method="gptq", importance=moments.identity) if moments else Options()
        convert("tiny", Source(source), scratch / name, options, lambda n: None, moments)
        calibrate_thresholds(scratch / name, Limit("kl", 0.02), Settings())
    return scratch / "better"


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
        model.apex._cache.check_integrity()
        model.apex.close()
    return runs


def load(folder: Path, args: argparse.Namespace, **options: Any) -> PreTrainedModel:
    return apex_engine.load(folder, dtype=torch.float32, memory=args.memory, host_memory="100%", **options)


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


def synthetic(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Decode speed over the experts of a real shape on disk; every run begins with an empty cache and a warm-up."""
    shape = SHAPES[args.synthetic]
    start = time.perf_counter()
    write_store(folder, shape)
    device = torch.device(args.device)
    result: dict[str, Any] = {"machine": machine(device), "shape": args.synthetic, "memory": args.memory}
    result |= {"host_memory": args.host_memory, "write_seconds": time.perf_counter() - start}
    result["bytes_per_second"] = disk_rate(folder) if args.host_memory == "0" else 1e9 * copy_bandwidth(device, True)
    warm_up, total = 8, args.prompt + 8 + args.tokens
    result["lru"] = {
        rho: (Trace(shape, 512, 0).lru_hit_rate(int(rho * shape.chosen)), published)
        for rho, published in shape.published_lru.items()
    }
    runs = {name: Run() for name in args.steps if name != CALIBRATED}  # random experts have no KL
    for seed in track(range(args.repeats), "decoding", console=console):
        trace = Trace(shape, total, seed)
        for name, each in runs.items():
            kernels = "triton" if device.type == "cuda" else "auto"
            options = {"memory": args.memory, "host_memory": args.host_memory, "kernels": kernels, **STEPS[name]}
            engine = Engine(folder, Config.make(**options))
            # Checksums are compared once a blob: in the long run that takes no time, in this short one it would.
            everything = [ExpertId(i, e) for i in range(shape.layers) for e in range(shape.experts)]
            engine._store._verified |= {(expert, twin) for expert in everything for twin in TWINS}
            model = Model(engine, shape, trace, device)
            begin = time.perf_counter()
            model.run(0, args.prompt, "prefill", new=True)
            each.first.append(time.perf_counter() - begin)
            for token in range(args.prompt, args.prompt + warm_up):
                model.run(token, 1, "decode", new=False)
            engine.reset_stats()
            begin = time.perf_counter()
            for token in range(args.prompt + warm_up, total):
                model.run(token, 1, "decode", new=False)
            record(engine, time.perf_counter() - begin, args.tokens, each)
            engine.close()
    result["runs"] = {name: summary(each, result["bytes_per_second"]) for name, each in runs.items()}
    return result


def disk_rate(folder: Path) -> float:
    """Bytes a second of reading HIGH twins past the page cache, in blocks, as many at a time as the loader has workers."""
    manifest = Manifest.read(folder)
    store = ExpertStore(folder, manifest)
    stride = manifest.high.stride
    some = [ExpertId(layer, e) for layer in range(len(manifest.layers)) for e in range(min(8, manifest.experts))]
    raw = torch.empty(WORKERS, stride + ALIGN, dtype=torch.uint8)

    def read(block: tuple[int, int]) -> int:
        expert, start = some[block[0]], block[1]
        part = raw[block[0] % WORKERS]
        part = part[-part.data_ptr() % ALIGN :][start : min(start + BLOCK, stride)]
        store.read(expert, len(manifest.twins), part.numpy(), start)
        return len(part)

    with ThreadPoolExecutor(WORKERS) as pool:
        begin = time.perf_counter()
        done = sum(pool.map(read, [(i, start) for i in range(len(some)) for start in range(0, stride, BLOCK)]))
        rate = done / (time.perf_counter() - begin)
    return rate


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


def sweep(folder: Path, texts: Tensor, truth: Tensor, rate: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for speed in SPEEDS:
        link = f"{rate * speed:.0f}B/s,20us"
        for mode in ("adaptive", "exact"):
            both = {"with": {"mode": mode, "link": link}, "without": {"mode": mode, "link": link, "prefetch": 0}}
            runs = measure(dict.fromkeys(both, folder), both, texts, truth, args)
            rows.append({"speed": speed, "mode": mode, "gain": gain(runs["with"].decode, runs["without"].decode)})
            say(f"link x{speed:g}, {mode}: prefetch gives {rows[-1]['gain']:.3f}x")
    return rows


def prompts(folder: Path, tokenizer: Any, source: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode hit rates after prompts of two lengths that end in the same text."""
    longest = max(PROMPTS)
    texts = torch.cat([windows(tokenizer, t, args.windows, longest + args.tokens) for t in domains(source).values()])
    rows = []
    for admission in ("stream", "evict"):
        for mode in ("adaptive", "exact"):
            for length in PROMPTS:
                model, run = load(folder, args, admission=admission, mode=mode, prefetch=0), Run()
                for row in texts:
                    one_text(model, row[longest - length :], None, length, run)
                model.apex.close()
                rows.append(
                    {"admission": admission, "mode": mode, "prompt": length, "hit_rate": statistics.mean(run.hits[1:])}
                )
                say(str(rows[-1]))
    return rows


def markdown(result: dict[str, Any]) -> str:
    if "link" in result:
        rate = result["link"]["bytes_per_second"]
        head = f"{result['texts']} texts of {result['prompt']} + {result['tokens']} tokens, link {rate / 1e6:.0f} MB/s, 20 us"
    else:
        rate = result["bytes_per_second"]
        fits = ", ".join(f"{found:.2f} ({published:.2f}) at {rho}" for rho, (found, published) in result["lru"].items())
        source = "the disk" if result["host_memory"] == "0" else "host memory"
        head = (
            f"shape of {result['shape']}, experts written in {result['write_seconds']:.0f} s, {rate / 1e9:.2f} GB/s from {source}"
        ) + (f"; LRU hit rate of the trace (published) by slots a layer / chosen: {fits}" if fits else "")
    lines = [f"Machine: {result['machine']}. {result['memory']} of all HIGH twins resident; {head}.", ""]
    if "runs" in result:
        lines += [
            "| | tokens/s | x on-demand | first token s | stalled | busy while stalled | MB a token | hits | link used "
            "| x bound | KL |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        times = {name: row["decode_seconds"] for name, row in result["runs"].items()}
        base = next(iter(times.values()))
        for name, row in result["runs"].items():
            lines.append(
                f"| {name} | {row['tokens_per_second']:.1f} | {gain(times[name], base):.2f} | {row['first_token_seconds']:.2f} "
                f"| {row['stall_share']:.0%} | {row['busy_while_stalled']:.0%} | {row['bytes_a_token'] / 1e6:.2f} "
                f"| {row['hit_rate']:.0%} | {row['link_busy']:.0%} | {row['of_the_bound']:.2f} "
                + (f"| {row['kl']:z.4f} |" if "link" in result else "| - |")
            )
        lines += [""] + [
            f"{name}, beside {other}: x {gain(times[name], times[other]):.3f}"
            for name, other in SIDE_BY_SIDE
            if {name, other} <= times.keys()
        ]
    for row in result.get("sweep", ()):
        lines.append(f"| {row['speed']:g} | {row['mode']} | {row['gain']:.3f} |")
    for row in result.get("prompts", ()):
        lines.append(f"| {row['admission']} | {row['mode']} | {row['prompt']} | {row['hit_rate']:.1%} |")
    return "\n".join(lines)


def gain(times: list[float], base: list[float]) -> float:
    """How many times as fast as `base`: the median of the texts' ratios."""
    return statistics.median(b / a for a, b in zip(times, base, strict=True))


def plot(result: dict[str, Any], path: Path) -> None:
    """Milliseconds of a token, waiting apart from the rest."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ApexError("--plot needs matplotlib: pip install matplotlib") from None
    names = list(result["runs"])[::-1]
    whole = [1e3 / result["runs"][name]["tokens_per_second"] for name in names]
    stalled = [ms * result["runs"][name]["stall_share"] for name, ms in zip(names, whole, strict=True)]
    figure = Figure(figsize=(7, 0.4 * len(names) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [a - b for a, b in zip(whole, stalled, strict=True)], color="#4477aa", label="computing")
    axes.barh(
        names, stalled, left=[a - b for a, b in zip(whole, stalled, strict=True)], color="#cc6677", label="waiting"
    )
    axes.set_xlabel("milliseconds a token")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    run(main)
