"""python -m benchmarks.decode: what each part of the runtime is worth, on the bundled model behind a simulated link."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from apex_engine.calibration.settings import Settings
from apex_engine.cli.console import quieten, run, say
from apex_engine.eval.machine import machine
from apex_engine.eval.texts import domains, windows
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import resolve
from benchmarks.links import find_link
from benchmarks.real_shapes import synthetic
from benchmarks.runs import Run, gain, load, measure, one_text, summary
from benchmarks.steps import CALIBRATED, STEPS
from benchmarks.synthetic import SHAPES
from benchmarks.tables import markdown, plot
from benchmarks.twins import calibrated_twins

SPEEDS = (10, 3, 1, 0.3, 0.1)  # of the link, in the sweep
PROMPTS = (16, 512)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    p.add_argument("--model", default="tiny", help="a folder with texts in text/; default: the bundled model")
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
        "--sweep",
        type=float,
        nargs="*",
        metavar="SPEED",
        help="the default with and without prefetch at multiples of the link's speed; alone: "
        + " ".join(f"{speed:g}" for speed in SPEEDS),
    )
    p.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        metavar="TOKENS",
        help="hit rates of decoding after prompts of these lengths; alone: " + " ".join(map(str, PROMPTS)),
    )
    p.add_argument(
        "--calibration-tokens",
        type=int,
        default=Settings.tokens,
        help="of text, for the calibrated twins; default: %(default)s",
    )
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the time of a token there (.svg, .png)")
    p.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    return p.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    quieten()
    with tempfile.TemporaryDirectory(dir=args.folder if args.synthetic else None) as scratch:
        result = synthetic(Path(scratch), args) if args.synthetic else benchmark(Path(scratch), args)
    print(json.dumps(result, indent=1) if args.json else markdown(result))
    if args.plot and "runs" in result:
        plot(result, args.plot)


def benchmark(scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    source = resolve(args.model)
    convert(args.model, Source(source), scratch / "apex", Options(), lambda n: None)
    tokenizer = AutoTokenizer.from_pretrained(source)
    length = args.prompt + args.tokens
    texts = torch.cat([windows(tokenizer, text, args.windows, length) for text in domains(source).values()])
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        truth = torch.stack([reference(row[None], use_cache=False).logits[0].log_softmax(-1) for row in texts])
    link = find_link(scratch / "apex", texts, args)
    result: dict[str, Any] = {"machine": machine(), "link": link, "memory": args.memory, "texts": len(texts)}
    result |= {"prompt": args.prompt, "tokens": args.tokens}
    text = f"{link['bytes_per_second']:.0f}B/s,20us"
    if args.sweep is not None:
        result["sweep"] = sweep(scratch / "apex", texts, truth, link["bytes_per_second"], args)
    elif args.prompts is not None:
        result["prompts"] = prompts(scratch / "apex", tokenizer, source, args)
    else:
        options = {name: {**STEPS[name], "link": text} for name in args.steps}
        folders = dict.fromkeys(options, scratch / "apex")
        if CALIBRATED in options:
            folders[CALIBRATED] = calibrated_twins(args.model, scratch, args.calibration_tokens)
        runs = measure(folders, options, texts, truth, args)
        result["runs"] = {name: summary(run, link["bytes_per_second"]) for name, run in runs.items()}
    return result


def sweep(folder: Path, texts: Tensor, truth: Tensor, rate: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for speed in args.sweep or SPEEDS:
        link = f"{rate * speed:.0f}B/s,20us"
        for mode in ("adaptive", "exact"):
            both = {"with": {"mode": mode, "link": link}, "without": {"mode": mode, "link": link, "prefetch": 0}}
            runs = measure(dict.fromkeys(both, folder), both, texts, truth, args)
            rows.append({"speed": speed, "mode": mode, "gain": gain(runs["with"].decode, runs["without"].decode)})
            say(f"link x{speed:g}, {mode}: prefetch gives {rows[-1]['gain']:.3f}x")
    return rows


def prompts(folder: Path, tokenizer: Any, source: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode hit rates after prompts of two lengths that end in the same text."""
    lengths = args.prompts or PROMPTS
    longest = max(lengths)
    texts = torch.cat([windows(tokenizer, t, args.windows, longest + args.tokens) for t in domains(source).values()])
    rows = []
    for admission in ("stream", "evict"):
        for mode in ("adaptive", "exact"):
            for length in lengths:
                model, run = load(folder, args, admission=admission, mode=mode, prefetch=0), Run()
                for row in texts:
                    one_text(model, row[longest - length :], None, length, run)
                model.apex.close()
                rows.append(
                    {"admission": admission, "mode": mode, "prompt": length, "hit_rate": statistics.mean(run.hits[1:])}
                )
                say(str(rows[-1]))
    return rows


if __name__ == "__main__":
    run(main)
