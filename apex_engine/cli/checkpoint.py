"""The checkpoint that a command's user named: where it is, and its tokenizer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from apex_engine.checkpoint.atomic import sha256_of
from apex_engine.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Manifest
from apex_engine.cli.console import say
from apex_engine.cli.quantizing import quantize
from apex_engine.errors import ApexError, first_line
from apex_engine.quantize.journal import JOURNAL
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.names import ALIASES, resolve


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
