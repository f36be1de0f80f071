"""The tensors of a checkpoint on disk, in one safetensors file or several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from apex_engine.errors import ApexError


@dataclass(frozen=True)
class TensorRef:
    """One tensor on disk."""

    shard: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * int(re.findall(r"\d+", self.dtype)[0]) // 8 if self.dtype != "BOOL" else numel


class Shards:
    """The safetensors files of a directory, opened when they are needed. Raises ApexError for what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = _read_headers(folder)
        self._open: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        """One tensor as it is on disk."""
        return self._guarded(self.tensors[name].shard, lambda shard: shard.get_tensor(name))

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        """Entries `start`..`stop` of its first dimension."""
        return self._guarded(self.tensors[name].shard, lambda shard: shard.get_slice(name)[start:stop])

    def close(self) -> None:
        """Give back what was read: the pages of an open file count as this process's memory."""
        self._open.clear()  # safetensors files have no close of their own

    def fingerprint(self, sha: Any) -> None:
        """Feed `sha` every tensor's name, dtype and shape, and samples of every shard's bytes."""
        for name, ref in sorted(self.tensors.items()):
            sha.update(f"{name} {ref.dtype} {ref.shape} {ref.shard.name}\n".encode())
        for shard in sorted({ref.shard for ref in self.tensors.values()}):
            size = shard.stat().st_size
            with shard.open("rb") as file:
                for i in range(64):  # 64 places of 4 KiB: two models of one family differ in some of them
                    file.seek(size * i // 64)
                    sha.update(file.read(4096))

    def _guarded(self, path: Path, read: Callable[[Any], Tensor]) -> Tensor:
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return read(self._open[path])
        except (SafetensorError, OSError) as error:
            raise ApexError(f"{path} cannot be read ({error}): download it again") from None


def _read_headers(folder: Path) -> dict[str, TensorRef]:
    index = folder / "model.safetensors.index.json"
    shards, listed = _find_shards(folder, index)
    tensors: dict[str, TensorRef] = {}
    for shard in shards:
        if not shard.is_file():
            raise ApexError(f"{shard} is missing, though {index.name} lists it: complete the download")
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                    part = file.get_slice(name)
                    tensors[name] = TensorRef(shard, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ApexError(f"{shard} is damaged or cut short ({error}): download it again") from None
    absent = sorted(listed - set(tensors))
    if absent:
        raise ApexError(f"{index} lists tensors that are in none of its shards: {some(absent)}: complete the download")
    return tensors


def _find_shards(folder: Path, index: Path) -> tuple[list[Path], set[str]]:
    """The files, and the tensors that the index promises; none without an index."""
    single = folder / "model.safetensors"  # takes precedence over an index, as in transformers
    if single.is_file():
        return [single], set()
    if index.is_file():
        try:
            listed = json.loads(index.read_text())["weight_map"]
            shards = sorted({folder / name for name in listed.values()})
            if not shards:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ApexError(f"{index} is damaged: download it again") from None
        return shards, set(listed)
    pickles = sorted(p.name for p in folder.glob("*.bin"))
    if pickles:
        raise ApexError(
            f"{folder} has only pickled weights ({pickles[0]}), which can run code when read: convert it with "
            "transformers' save_pretrained on a machine you trust, or take a safetensors revision"
        )
    raise ApexError(f"{folder} has no model.safetensors and no {index.name}: name a model's directory")


def some(names: list[str], most: int = 4) -> str:
    """The first of `names`, for a message."""
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
