"""python -m benchmarks.memory: peak memory of a run beside the plan, in docs/runtime.md.

A random Mixtral whose experts take 0.8 GB, at several budgets, each in a process of its own; beside it, a process that has
imported the same and run a model of two small layers: what torch and transformers take for themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import apex_engine
from apex_engine.cli.console import quieten, run
from apex_engine.errors import human
from apex_engine.eval.machine import machine
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source

SHAPE = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 8192}
BUDGETS = ("10%", "25%", "50%", "100%")


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    p.add_argument("--small", action="store_true", help="the small model in place of the large one too")
    p.add_argument("--budgets", nargs="+", default=list(BUDGETS), metavar="MEMORY", help="default: %(default)s")
    p.add_argument("--one", nargs=2, metavar=("FOLDER", "MEMORY"), help=argparse.SUPPRESS)
    args = p.parse_args(arguments)
    quieten()
    if args.one:
        print(json.dumps(peak(Path(args.one[0]), args.one[1])))
        return
    with tempfile.TemporaryDirectory() as scratch:
        base = measured(make(Path(scratch) / "small", SMALL), "100%")["peak"]
        large = make(Path(scratch) / "large", SMALL if args.small else SHAPE)
        print(f"Baseline {human(base)}.\n")
        print("| `--memory` | plan: dense, experts | peak above the baseline and the plan | prompt | decoded |")
        print("|---|---:|---:|---:|---:|")
        for memory in args.budgets:
            found = measured(large, memory)
            planned = found["dense"] + found["slots"]
            over = found["peak"] - base - planned
            parts = f"{human(found['dense'])}, {human(found['slots'])}"
            print(f"| {memory} | {parts} | {human(over)} | {found['prompt']} | {found['new']} |", flush=True)
    print(f"\nMachine: {machine()}.")


def make(folder: Path, shape: dict[str, int]) -> Path:
    """An apex checkpoint of a random model."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("mixtral", **shape, **heads)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "source")
    convert("random", Source(folder / "source"), folder / "apex", Options(), lambda n: None)
    return folder / "apex"


def measured(folder: Path, memory: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", "--one", str(folder), memory]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result


def peak(folder: Path, memory: str) -> dict[str, Any]:
    """A prompt of 256 tokens and 64 decoded ones, and the most this process has held."""
    model = apex_engine.load(folder, memory=memory)
    prompt, new = torch.randint(0, 8192, (1, 256)), 64
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, pad_token_id=0
    )
    plan = model.apex.plan
    # Not getrusage, whose maximum includes the parent's memory at the fork.
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(lines["VmHWM"].split()[0]) << 10
    return {"peak": held, "dense": plan.dense_bytes, "slots": plan.slot_bytes, "prompt": 256, "new": new}


if __name__ == "__main__":
    run(main)
