"""The engine of a checkpoint beside its reference, and both on one text."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.cli.console import loading_bars
from apex_engine.cli.options import engine_config
from apex_engine.core.ledger import Ledger
from apex_engine.errors import ApexError, first_line
from apex_engine.eval.perplexity import Comparison, decoded_logits, judge, window_logits
from apex_engine.eval.texts import read_text, strided, token_ids
from apex_engine.memory.probe import parse_device
from apex_engine.quantize.source.names import ALIASES
from apex_engine.runtime.hook import load

WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1:test"
Watch = Callable[[tuple[Tensor, ...]], Iterable[Tensor]]


class Pair:
    """The reference is another model, or the same one in `exact` mode."""

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel | None = None) -> None:
        self.engine, self._model, self._reference = model.apex, model, reference or model
        self.dtype, self.device = model.dtype, model.device

    def reference(self) -> PreTrainedModel:
        """The reference, ready to be asked until `in_mode` makes the engine ready."""
        if self._reference is self._model:
            self.engine.decide("exact")
        return self._reference

    def in_mode(self, mode: str) -> PreTrainedModel:
        """The engine's model, ready to be asked in `mode` until `reference`."""
        self.engine.decide(mode)
        return self._model

    def compare(
        self, windows: Tensor, ledgers: dict[str, Ledger], last: int | None = None, watch: Watch = iter
    ) -> dict[str, Comparison]:
        """Mode -> comparison on `windows` `[W, N]`, one window at a time, `last` predictions of each.

        The modes are those of `ledgers`, which count what the engine does in them. It has each window from an empty cache;
        in `adaptive` mode token by token.
        """
        parts: dict[str, list[Comparison]] = {mode: [] for mode in ledgers}
        for row in watch(windows.split(1)):
            self.engine.reset_stats()
            truth = window_logits(self.reference(), row)
            for mode, ledger in ledgers.items():
                model = self.in_mode(mode)
                self.engine.evict_all()
                self.engine.reset_stats(ledger)
                found = (decoded_logits if mode == "adaptive" else window_logits)(model, row)
                parts[mode].append(judge(row, truth, found, last))
        return {mode: Comparison.joined(some) for mode, some in parts.items()}


def load_pair(args: argparse.Namespace, folder: Path, reference: Path | None) -> Pair:
    """The checkpoint `folder` with slots for both twins, by the engine's options in `args`.

    In float32 on a CPU, unless a dtype is given: in 16 bits, sums and with them answers depend on what else is in a batch. With
    the kernels of `deterministic` mode, which keep to transformers' own sums. Without prefetching, so that bytes do not depend
    on the time that reads take. Raises ApexError.
    """
    if args.upgrade == "async":
        raise ApexError("--upgrade async serves what happens to be there when a prompt comes: it cannot be judged here")
    device = parse_device(args.device)
    dtype = "float32" if args.dtype == "auto" and device.type == "cpu" else args.dtype
    options = {**vars(engine_config(args, device, prefetch=0)), "mode": "deterministic"}
    with loading_bars() as told:
        model = load(folder, dtype=None if dtype == "auto" else dtype, device=device, progress=told, **options)
    return Pair(model, _load_reference(reference, model.dtype, device) if reference else None)


def _load_reference(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if not folder.is_dir():
        raise ApexError(f"--reference {folder} is no directory: name that of a Hugging Face model")
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    except (OSError, ValueError, ImportError) as error:
        raise ApexError(f"--reference {folder} is no model transformers can load ({first_line(error)})") from None


def read_windows(
    names: list[str] | None, manifest: Manifest, tokenizer: Any, tokens: int, length: int, stride: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Text -> windows `[W, length]`, and why a text that nobody named cannot be had. Raises ApexError for one that was named."""
    found: dict[str, Tensor] = {}
    missing = []
    for name in names or default_texts(manifest):
        try:
            found[name] = strided(token_ids(tokenizer, read_text(name))[:tokens], length, stride)
        except ApexError as error:
            if names:
                raise
            missing.append(f"text: {error}")
    labels = [Path(name).stem for name in found]
    return dict(zip(labels if len(set(labels)) == len(labels) else found, found.values(), strict=True)), missing


def default_texts(manifest: Manifest) -> list[str]:
    """The held-out text of the bundled model, else wikitext."""
    own = Path(ALIASES["tiny"]) / "text"
    if Path(manifest.source).name in ("tiny", own.parent.name) and own.is_dir():
        return [str(path) for path in sorted(own.glob("*.txt"))]
    return [WIKITEXT]
