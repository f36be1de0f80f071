"""Texts to measure on: files, datasets, the held-out text of the bundled model; and their windows of tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apex_engine.errors import ApexError, first_line

# Standard-library modules that were not in the bundled model's training data.
CODE_MODULES = ("textwrap", "queue", "shelve", "tempfile", "json")


def domains(model_folder: Path) -> dict[str, str]:
    """Domain -> held-out text of the bundled model, from `model_folder`/text and the standard library."""
    texts = {path.stem: path.read_text() for path in sorted((model_folder / "text").glob("*.txt"))}
    texts["code"] = "\n".join(path.read_text() for name in CODE_MODULES for path in _sources(name))
    return texts


def _sources(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin)
    return sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]


def read_text(name: str) -> str:
    """The text of a file, or the column "text" of a dataset: "owner/name", "owner/name:config", "owner/name:config:split"
    (split "test" if not given). Raises ApexError."""
    if Path(name).is_file():
        try:
            return Path(name).read_text()
        except (OSError, UnicodeError) as error:
            raise ApexError(f"{name} cannot be read as text: {error}") from None
    path, config, split = [*name.split(":"), "", ""][:3]
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise ApexError(f"{name} is neither a file nor the name of a dataset (owner/name:config:split)")
    try:
        from datasets import load_dataset  # a heavy import that a file does not need
    except ModuleNotFoundError:
        raise ApexError(
            f"the dataset {name} needs the datasets package, which is not installed: pip install 'apex-engine[eval]', or name a "
            "text file"
        ) from None
    try:
        rows = load_dataset(path, config or None, split=split or "test")
        return "\n".join(rows["text"])
    except Exception as error:  # whatever the hub, the network and the files give rise to
        raise ApexError(
            f"the dataset {name} cannot be had ({first_line(error)}): without network, name a text file"
        ) from None


def windows(tokenizer: Any, text: str, count: int, length: int) -> Tensor:
    """Token ids `[count, length]`: windows at equal distances over the whole text, not overlapping."""
    ids = token_ids(tokenizer, text)
    room = len(ids) // length
    if room < count:
        raise ValueError(f"the text has {len(ids)} tokens: {room} windows of {length}, not {count}")
    starts = [length * (i * room // count) for i in range(count)]
    return torch.stack([ids[start : start + length] for start in starts])


def strided(ids: Tensor, length: int, stride: int) -> Tensor:
    """Windows `[W, length]` of the token ids `[n]`, each `stride` tokens after the one before; what is left is dropped.

    Raises ApexError where the text is shorter than a window.
    """
    if len(ids) < length:
        raise ApexError(f"the text has {len(ids)} tokens, fewer than one window of {length}: lower --length")
    return ids.unfold(0, length, stride)


def token_ids(tokenizer: Any, text: str) -> Tensor:
    """`[n]`."""
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    return ids
