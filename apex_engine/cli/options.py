"""What the commands that run a checkpoint share: which one, and the engine's options.

The help texts say what `Config` says, and take its defaults.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from apex_engine.checkpoint.atomic import sha256_of
from apex_engine.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest
from apex_engine.cli.console import say
from apex_engine.cli.quantizing import quantize
from apex_engine.config import DTYPES, MODES, PREDICTORS, SYSTEMS, THRESHOLDS, Config
from apex_engine.core.policies import POLICIES
from apex_engine.core.thresholds import DEFAULTS
from apex_engine.errors import ApexError, first_line, flag
from apex_engine.kernels.registry import KERNELS
from apex_engine.memory.plan import config_for
from apex_engine.quantize.journal import JOURNAL
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.names import ALIASES, resolve

ENGINE_OPTIONS = (
    "system",
    "mode",
    "memory",
    "device_memory",
    "host_memory",
    "thresholds",
    "t1",
    "t2",
    "first_t1",
    "low_share",
    "upgrade",
    "policy",
    "admission",
    "prefetch",
    "predictor",
    "link",
    "kernels",
)


def add_engine_options(
    p: argparse.ArgumentParser,
    mode: str = Config.mode,
    prefetch: int | str = Config.prefetch,
    dtype: str = "the model's",
) -> argparse._ArgumentGroup:
    """The options of `Config`, and --device and --dtype; what is not given is None. Returns their group.

    `mode`, `prefetch`, `dtype`: what the help calls their defaults, where a command has its own.
    """
    default = Config()
    engine = p.add_argument_group("engine")
    add = engine.add_argument
    add("--system", choices=SYSTEMS, help="a preset for the options below; default: default")
    add("--mode", choices=MODES, help=f"default: {mode}")
    add(
        "--memory",
        help='for resident experts: bytes, "6GiB", or a share of all HIGH twins such as "50%%"; '
        f"default: {default.memory}%",
    )
    add(
        "--device-memory",
        metavar="BYTES",
        help='instead of --memory: for dense weights, KV cache and experts together; "auto": what is free less a tenth',
    )
    add(
        "--host-memory",
        metavar="BYTES",
        help="for a second tier of experts in host memory, with a GPU or --link; a share is one of all twins; default: none",
    )
    t1, t2, first_t1 = DEFAULTS["calibrated"]
    add(
        "--thresholds",
        choices=THRESHOLDS,
        help="where none is given below: calibrated, those of each layer that `python -m apex_engine.calibrate` found; "
        f"quantile, MoE-APEX's shares of the model's own scores; default: {default.thresholds}",
    )
    add("--t1", type=float, help=f"gate score up to which an expert is HIGH; uncalibrated: {t1}")
    add("--t2", type=float, help=f"score above which it is skipped; uncalibrated: {t2}")
    add("--first-t1", type=float, help=f"t1 of the first MoE layer, if higher than t1; uncalibrated: {first_t1}")
    add(
        "--low-share",
        type=_share,
        help='share of the memory for LOW twins; "auto": a twentieth, calibrated a tenth; "floor": all of them are resident; '
        "default: auto",
    )
    add(
        "--upgrade",
        choices=("wait", "async"),
        help="async: where HIGH is wanted and only LOW is resident, LOW serves and HIGH comes later; default: wait",
    )
    add("--policy", choices=POLICIES, help=f"eviction; default: {default.policy}")
    add(
        "--admission",
        choices=("stream", "evict"),
        help=f"what a prompt may do to the resident experts; default: {default.admission}",
    )
    add("--prefetch", type=int, metavar="LAYERS", help=f"how far ahead to predict; 0: not; default: {prefetch}")
    add(
        "--predictor",
        choices=PREDICTORS,
        help="what says which experts come: gate, the later layer's router with this layer's input; norm, with the norm weight "
        f"corrected; learned, a copy of that router which learns from every token; default: {default.predictor}",
    )
    add("--link", metavar="RATE,LATENCY", help='simulate a link to the device, such as "2GB/s,20us"')
    add("--kernels", choices=KERNELS, help=f"what computes the experts; default: {default.kernels}")
    p.set_defaults(**dict.fromkeys(ENGINE_OPTIONS))
    add("--device", default="cpu", help="cpu, cuda, cuda:1; default: %(default)s")
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help=f"of the computation; default: {dtype}",
    )
    return engine


def engine_config(args: argparse.Namespace, device: torch.device, **defaults: Any) -> Config:
    """The options that were given, over `defaults`. Raises ApexError."""
    given = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}
    if "memory" in given and "device_memory" in given:
        raise ApexError("two budgets: --memory is for experts, --device-memory for all there is; drop one")
    config = config_for(device, **{**defaults, **given})
    if config.mode == "exact":
        for name in ("thresholds", "t1", "t2", "first_t1", "low_share"):
            if name in given:
                raise ApexError(f"{flag(name)} has no effect in exact mode, which has no LOW twins: drop it")
    return config


def demo_checkpoint() -> Path:
    """The bundled model's apex checkpoint in the user's cache directory, made on first use."""
    source, options = resolve("tiny"), Options()
    weights = sha256_of(source / "model.safetensors")
    identity = hashlib.sha256(f"{source} {weights} {options} {FORMAT_VERSION}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apex-engine"
    folder = cache / f"tiny-mixtral-{identity}"
    if not (folder / MANIFEST).is_file():
        say(f"quantizing the bundled model into {folder} (once)")
        quantize("tiny", folder, options)
    return folder


def open_checkpoint(name: str | None) -> tuple[Path, Manifest]:
    """Folder and manifest of the checkpoint a user named; None and "tiny" are the bundled model. Raises ApexError."""
    folder = demo_checkpoint() if name in (None, "tiny") else Path(name)
    if not folder.is_dir():
        known = str(folder) in ALIASES
        advice = (
            f"make it with `python -m apex_engine.quantize {folder}`, then give checkpoints/{folder}-apex"
            if known
            else "the first argument is the folder of an apex checkpoint"
        )
        raise ApexError(f"{folder} is no directory: {advice}")
    if (folder / "config.json").is_file() and not (folder / MANIFEST).is_file() and not (folder / JOURNAL).is_file():
        raise ApexError(
            f"{folder} is not an apex checkpoint but an ordinary model: make one of it with "
            f"`python -m apex_engine.quantize {folder}`, then give checkpoints/{folder.resolve().name}-apex"
        )
    return folder, Manifest.read(folder)


def read_tokenizer(folder: Path) -> Any:
    """Raises ApexError where the checkpoint has none."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the libraries behind it raise whatever they like
        raise ApexError(
            f"{folder} has no tokenizer transformers can read ({first_line(error)}): "
            "copy the source's tokenizer files there"
        ) from None


def _share(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # "auto", "floor", or refused with the others
