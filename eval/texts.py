"""Held-out text of the bundled model: two files beside it, and Python source from the running interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Standard-library modules that were not in the bundled model's training data.
CODE_MODULES = ("textwrap", "queue", "shelve", "tempfile", "json")


def domains(model_folder: Path) -> dict[str, str]:
    """Domain -> text, from `model_folder`/text and the standard library."""
    texts = {path.stem: path.read_text() for path in sorted((model_folder / "text").glob("*.txt"))}
    texts["code"] = "\n".join(path.read_text() for name in CODE_MODULES for path in _sources(name))
    return texts


def _sources(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin)
    return sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]


def windows(tokenizer: PreTrainedTokenizerBase, text: str, count: int, length: int) -> Tensor:
    """Token ids `[count, length]`: windows at equal distances over the whole text, not overlapping."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    room = len(ids) // length
    if room < count:
        raise ValueError(f"the text has {len(ids)} tokens: {room} windows of {length}, not {count}")
    starts = [length * (i * room // count) for i in range(count)]
    return torch.stack([ids[start : start + length] for start in starts])
