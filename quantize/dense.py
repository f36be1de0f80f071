"""The dense part of a checkpoint: everything but the routed experts, bit-equal to the source."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from apex_engine.checkpoint.atomic import atomic_path, sha256_of
from apex_engine.checkpoint.manifest import FileEntry
from apex_engine.quantize.source.model import Source

DENSE_SHARD = 1 << 30  # bytes of a dense file, unless one tensor is larger


def plan_dense(source: Source) -> dict[str, list[str]]:
    """Dense file name -> the tensors in it, in the order of the source's shards."""
    groups: list[list[str]] = []
    size = DENSE_SHARD
    for name in sorted(source.dense, key=lambda name: (source.tensors[name].shard.name, name)):
        nbytes = source.tensors[name].nbytes
        if size + nbytes > DENSE_SHARD:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def write_dense(source: Source, path: Path, names: list[str], guard: str | None) -> FileEntry:
    """The file `path` with the tensors `names` of the source, and one called `guard`, of `manifest.guard_name`."""
    tensors = {name: source.read(name) for name in names}
    if guard:
        tensors[guard] = torch.zeros(1, dtype=torch.bfloat16)
    with atomic_path(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return FileEntry(path.stat().st_size, sha256_of(path))
