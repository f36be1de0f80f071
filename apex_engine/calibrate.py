"""python -m apex_engine.calibrate CHECKPOINT: find out what the LOW twins cost, layer by layer, and how far to use them.

    1. text, given or sampled from the model itself
    2. an exact pass over it: second moments of the experts' inputs, errors of the LOW twins by gate score
    3. each layer with LOW twins alone: what an error there does to the predictions
    4. thresholds for a limit, tried and corrected until what is measured meets it

Letters: T tokens, K chosen experts a token, L MoE layers, E experts, W windows, N tokens a window.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, set_seed

from apex_engine.calibration.recorder import Recorder
from apex_engine.calibration.search import CURVE, SEARCH_ROUNDS, Advance, Limit, Trials, search, sensitivities
from apex_engine.checkpoint.atomic import atomic_file, check_writable
from apex_engine.checkpoint.calibration import CALIBRATION, CALIBRATION_VERSION, twins_of
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.checkpoint.moments import LEAST_TOKENS, MOMENTS, write_moments
from apex_engine.cli.console import console, progress_bar, quieten, run, say
from apex_engine.cli.options import open_checkpoint, read_tokenizer
from apex_engine.config import Config, parse_memory
from apex_engine.core.thresholds import quantiles
from apex_engine.errors import ApexError, check_seed, flag, human
from apex_engine.eval.texts import read_text, token_ids, windows
from apex_engine.memory.probe import free_memory, parse_device
from apex_engine.runtime.engine import Engine
from apex_engine.runtime.hook import load

MAX_KL = 0.01  # nats a token; twice that costs the bundled model a point of accuracy (docs/delta-report.md)
TRIAL_WINDOWS = 16  # that thresholds are tried on
MOST_LOGITS = 1 << 30  # bytes of the reference's predictions that are kept


@dataclass(frozen=True)
class Settings:
    """What is measured on, and how. Defaults live here only."""

    data: str = "self"  # a file, a dataset, or "self": text that the model writes
    tokens: int = 32768
    length: int = 256  # tokens seen at once
    batch_size: int = 8  # windows a pass
    block: int = 512  # columns whose second moments are taken together
    memory: int | str = Config.memory
    device: str = "cpu"
    seed: int = 0  # of the text that the model writes

    def __post_init__(self) -> None:
        for name in ("tokens", "length", "batch_size", "block"):
            if getattr(self, name) < 1:
                raise ApexError(f"{flag(name)} {getattr(self, name)}: at least 1")
        check_seed(self.seed)
        if self.length < 2:
            raise ApexError(f"--length {self.length}: at least 2")
        if self.tokens < 2 * self.length:
            raise ApexError(f"--tokens {self.tokens}: at least two windows of --length {self.length} are needed")


def sample(model: PreTrainedModel, count: int, length: int, seed: int, advance: Advance) -> Tensor:
    """Token ids `[count, length]` that the model itself writes, at temperature 1, from nothing: text it finds likely.

    All at once, since each step needs nearly all experts, however few the texts. `advance` is told of each step.
    """
    config = model.config.get_text_config()
    start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    start = start[0] if isinstance(start, list) else start
    if start is None:
        raise ApexError("the model has no token that begins a text: give one with --data")

    class Told(StoppingCriteria):
        def __call__(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
            advance(1)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    set_seed(seed)
    begin = torch.full((count, 1), start, device=model.device)
    written: Tensor = model.generate(
        begin,
        attention_mask=torch.ones_like(begin),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
        pad_token_id=start,
        stopping_criteria=[Told()],
    )
    return written.cpu()


def record(model: PreTrainedModel, folder: Path, rows: Tensor, settings: Settings, advance: Advance) -> Recorder:
    """An exact pass over the windows `rows` `[W, N]`."""
    engine: Engine = model.apex
    recorder = Recorder(folder, engine.manifest, settings.block)
    engine.decide("exact")
    try:
        with engine.watched(recorder):
            for some in rows.split(settings.batch_size):
                with torch.no_grad():
                    model(input_ids=some.to(model.device), use_cache=False)
                advance(len(some))
    finally:
        recorder.close()
    return recorder


def calibrate(folder: Path, limit: Limit, settings: Settings) -> dict[str, Any]:
    """Measure an apex checkpoint, and write both files beside it. Returns the content of the JSON file. Raises ApexError."""
    manifest = Manifest.read(folder)
    _check_room(folder, manifest, settings)
    text = None if settings.data == "self" else read_text(settings.data)
    # The thresholds of an earlier calibration, perhaps of other twins, have no part in this one.
    options: dict[str, Any] = {"mode": "deterministic", "memory": settings.memory, "prefetch": 0, "t1": 0.5}
    model = load(folder, device=parse_device(settings.device), **options)
    engine: Engine = model.apex
    rows, what = _windows(model, folder, text, settings)
    with progress("recording", len(rows)) as advance:
        recorder = record(model, folder, rows, settings, advance)
    profile = recorder.profile()
    write_moments(folder, manifest.fingerprint, recorder.tensors())
    vocabulary = model.config.get_text_config().vocab_size
    few = max(2, min(len(rows), TRIAL_WINDOWS, MOST_LOGITS // (4 * vocabulary * rows.shape[1])))
    engine.decide("exact")
    trials = Trials(model, rows[:: max(1, len(rows) // few)][:few], settings.batch_size)
    with progress("trying LOW twins, layer by layer", len(manifest.layers) * len(trials)) as advance:
        sensitivity = sensitivities(trials, profile, advance)
    with progress("trying thresholds", (SEARCH_ROUNDS + len(CURVE) - 1) * len(trials)) as advance:
        thresholds, point, curve = search(trials, profile, sensitivity, manifest, limit, advance)
    engine.close()
    low, whole = np.moveaxis(recorder.errors, 2, 0)
    content = {
        "version": CALIBRATION_VERSION,
        "twins": twins_of(manifest),
        "data": what,
        "tokens": rows.numel(),
        "limit": str(limit),
        "thresholds": {"t1": thresholds.t1, "t2": thresholds.t2},
        "measured": point,
        "quantiles": quantiles(profile),
        "curve": curve,
        "layers": {
            "sensitivity": sensitivity.tolist(),
            "kl_all_low": (sensitivity * profile.low_error.sum(1)).tolist(),
        },
        "experts": {
            "tokens": recorder.tokens.tolist(),
            "low_error": np.sqrt(low / np.maximum(whole, np.finfo(np.float64).tiny)).round(4).tolist(),
        },
        "profile": {name: np.round(values, 9).tolist() for name, values in asdict(profile).items()},
    }
    with atomic_file(folder / CALIBRATION) as file:
        file.write(json.dumps(content).encode())
    return content


def _windows(model: PreTrainedModel, folder: Path, text: str | None, settings: Settings) -> tuple[Tensor, str]:
    """Token ids `[W, N]` of `text`, or of what the model writes; and what they are."""
    count, length = settings.tokens // settings.length, settings.length
    if text is None:
        model.apex.decide("exact")
        with progress("writing text", length - 1) as advance:
            rows = sample(model, count, length, settings.seed, advance)
        return rows, f"text the model wrote itself, seed {settings.seed}"
    tokenizer = read_tokenizer(folder)
    count = min(count, len(token_ids(tokenizer, text)) // length)
    if count < 2:
        raise ApexError(
            f"{settings.data} has fewer than two windows of {length} tokens: lower --length, or take another"
        )
    digest = sha256(text.encode()).hexdigest()[:12]
    return windows(tokenizer, text, count, length), f"{settings.data} (sha256 {digest})"


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    with progress_bar(what) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)


def show(content: dict[str, Any], manifest: Manifest) -> None:
    """The thresholds and the trade-off on stderr."""
    table = Table(title=f"thresholds for {content['limit']}, by layer", title_justify="left")
    for column in ("MoE layer", "T1", "T2", "KL if all its experts are LOW", "worst expert's LOW output error"):
        table.add_column(column, justify="right")
    for i, (t1, t2) in enumerate(zip(*content["thresholds"].values(), strict=True)):
        worst = max(content["experts"]["low_error"][i])
        shown = "all LOW" if t1 < 0 else f"{t1:.2f}"
        table.add_row(
            str(manifest.layers[i].number),
            shown,
            f"{t2:.2f}",
            f"{content['layers']['kl_all_low'][i]:.4f}",
            f"{worst:.2f}",
        )
    console.print(table)
    table = Table(title="trade-off, measured", title_justify="left")
    for column in ("KL", "perplexity", "calls LOW", "skipped", "gate mass LOW"):
        table.add_column(column, justify="right")
    for point in content["curve"]:
        chosen = point == content["measured"]
        table.add_row(
            f"{point['kl']:.4f}",
            f"{point['change']:+.2%}",
            f"{point['share_low']:.1%}",
            f"{point['share_skip']:.1%}",
            f"{point['gate_mass_low']:.1%}",
            style="bold" if chosen else None,
        )
    console.print(table)
    short = sum(tokens < LEAST_TOKENS for row in content["experts"]["tokens"] for tokens in row)
    if short:
        say(f"note: {short} experts were chosen by fewer than {LEAST_TOKENS} tokens: more --tokens tell more of them")


def plot(content: dict[str, Any], path: Path) -> None:
    """The trade-off curve."""
    from matplotlib.figure import Figure  # a heavy import that nothing else needs

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    kl = [point["kl"] for point in content["curve"]]
    for name, label in (
        ("share_low", "calls LOW"),
        ("gate_mass_low", "gate mass LOW"),
        ("share_skip", "calls skipped"),
    ):
        axes.plot(kl, [100 * point[name] for point in content["curve"]], marker="o", label=label)
    axes.axvline(content["measured"]["kl"], color="grey", linestyle=":", label=f"chosen for {content['limit']}")
    axes.set(xlabel="KL(all HIGH || engine), nats a token", ylabel="share, %", xscale="log", ylim=(0, 100))
    axes.legend()
    figure.savefig(path)


def parser() -> argparse.ArgumentParser:
    default = Settings()
    p = argparse.ArgumentParser(
        prog="python -m apex_engine.calibrate",
        description="Measure what the LOW twins of an apex checkpoint cost, and choose the thresholds of each layer for a limit. "
        f"Writes {CALIBRATION}, which every later run of the checkpoint uses, and {MOMENTS}, from which `python -m "
        "apex_engine.quantize --importance` makes better LOW twins.",
    )
    p.add_argument("model", help="an apex checkpoint; `tiny`: the bundled model")
    p.add_argument(
        "--data",
        default=default.data,
        help="a text file, a dataset (owner/name:config:split), or self: text the model writes itself, which needs neither, but "
        "as many steps as --length, each with nearly all experts; default: %(default)s",
    )
    limit = p.add_mutually_exclusive_group()
    limit.add_argument(
        "--max-kl", type=float, metavar="NATS", help=f"limit of the mean KL divergence a token; default: {MAX_KL:g}"
    )
    limit.add_argument("--max-drop", metavar="SHARE", help="instead: how much the perplexity may rise, such as 0.5%%")
    p.add_argument("--tokens", type=int, default=default.tokens, help="of text; default: %(default)s")
    p.add_argument("--length", type=int, default=default.length, help="tokens seen at once; default: %(default)s")
    p.add_argument("--batch-size", type=int, default=default.batch_size, help="windows a pass; default: %(default)s")
    p.add_argument(
        "--block",
        type=int,
        default=default.block,
        help="columns whose second moments are taken together, for --low-method gptq; 1 takes little memory; "
        "default: %(default)s",
    )
    p.add_argument("--memory", default=default.memory, help="for resident experts; default: %(default)s")
    p.add_argument("--device", default=default.device, help="cpu, cuda, cuda:1; default: %(default)s")
    p.add_argument("--seed", type=int, default=default.seed, help="of the text the model writes; default: %(default)s")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the trade-off there (.svg, .png)")
    return p


def main() -> None:
    args = parser().parse_args()
    limit = _limit(args)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    if args.plot and (find_spec("matplotlib") is None or args.plot.suffix not in (".svg", ".png", ".pdf")):
        raise ApexError(
            f"--plot {args.plot}: needs matplotlib (pip install 'apex-engine[eval]') and .svg, .png or .pdf"
        )
    if args.plot:
        check_writable(args.plot)
    quieten()
    folder, manifest = open_checkpoint(args.model)
    content = calibrate(folder, limit, settings)
    show(content, manifest)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(content, args.plot)
    point = content["measured"]
    say(f"written to {folder / CALIBRATION}: every later run of this checkpoint uses these thresholds")
    print(
        f"{limit}: measured KL {point['kl']:.4f}, perplexity {point['change']:+.2%}, "
        f"{point['share_low']:.0%} of calls LOW, {point['share_skip']:.1%} skipped"
    )


def _limit(args: argparse.Namespace) -> Limit:
    if args.max_drop is None:
        value = MAX_KL if args.max_kl is None else args.max_kl
        kind = "kl"
    else:
        kind = "perplexity"
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", args.max_drop)
        if not match:
            raise ApexError(f"--max-drop {args.max_drop} is not understood: give a percentage such as 0.5%")
        value = float(match[1]) / 100
    if not 0 < value <= 10:
        raise ApexError(f"the limit must be above 0 and at most 10, not {value:g}")
    return Limit(kind, value)


def _check_room(folder: Path, manifest: Manifest, settings: Settings) -> None:
    """Before hours of work: whether the second moments fit in memory beside the model, and on the disk."""
    numbers = sum(math.prod(shape) for shape in Recorder.shapes(manifest, settings.block).values())
    needed, free = 4 * numbers * len(manifest.layers), free_memory(torch.device("cpu"))
    held = manifest.dense_bytes
    held += parse_memory(
        settings.memory, manifest.experts * len(manifest.layers) * manifest.strides[len(manifest.twins)]
    )
    if needed + held > 0.9 * free:
        raise ApexError(
            f"the second moments in blocks of {settings.block} take {human(needed)} and the model {human(held)}, and "
            f"{human(free)} of memory are free: a smaller --block takes less (1: what --low-method clip needs)"
        )
    check_writable(folder / CALIBRATION)
    room = shutil.disk_usage(folder).free
    if needed + (1 << 20) > room:
        raise ApexError(
            f"{folder} needs {human(needed)} more for the second moments, and its disk has {human(room)} free"
        )


if __name__ == "__main__":
    run(main)
