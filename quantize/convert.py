"""Source checkpoint -> apex checkpoint, one layer at a time, resumable.

A file gets its final name only when it is whole; a journal in the target records what is done, so that a run that was cut
short goes on where it stopped, and the manifest takes the journal's place at the very end.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from apex_engine.checkpoint.atomic import PART, atomic_path, sha256_of
from apex_engine.checkpoint.expert_file import expert_file, expert_file_bytes, expert_file_name
from apex_engine.checkpoint.manifest import FORMAT_VERSION, MANIFEST, FileEntry, LayerEntry, Manifest, Twin, guard_name
from apex_engine.checkpoint.moments import MatrixMoments, Moments
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import MATRICES, RAW, Layout, MatrixFormat, dequantize
from apex_engine.kernels.packing import GROUP_SIZES
from apex_engine.quantize.methods import METHODS, encode, feeds_back
from apex_engine.quantize.source import MoeLayer, Source

JOURNAL = "apex-journal.jsonl"
DENSE_SHARD = 1 << 30  # bytes of a dense file, unless one tensor is larger
# The source's files that are copied whole; its model card is not, since it is not the card of this checkpoint
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "LICENSE*", "NOTICE*", "*/*.jinja")
HIGH_FORMATS = ("16bit", "bfloat16", "float16", "int8")
# How a LOW matrix is made where second moments are given: as asked for, or in a simpler way for want of tokens or of blocks
FALLBACKS = ("as asked for", "clip instead of gptq", "unweighted")
Progress = Callable[[int], None]  # called with the number of experts just finished


@dataclass(frozen=True)
class Options:
    """What the twins are made of. Defaults live here only."""

    high: str = "16bit"  # "16bit" is the source's own dtype, lossless
    low_method: str = "clip"
    low_down: int = 2  # bits of the down matrix in the LOW twin; the up matrix always has 2
    group_size: int = 64
    importance: str = ""  # identity of the second moments the LOW twin is made with; "" without

    def layouts(self, source: Source) -> tuple[Layout, Layout]:
        """(HIGH, LOW) layouts for a source. Raises ApexError where an option does not fit it."""
        if self.high not in HIGH_FORMATS:
            raise ApexError(f"unknown HIGH format {self.high}: choose from {', '.join(HIGH_FORMATS)}")
        if self.low_method not in METHODS:
            raise ApexError(f"unknown LOW method {self.low_method}: choose from {', '.join(METHODS)}")
        if self.low_method == "gptq" and not self.importance:
            raise ApexError(
                "--low-method gptq needs --importance: make a checkpoint with clip, calibrate it, and name it there"
            )
        if self.low_method == "hqq" and self.importance:
            raise ApexError("--low-method hqq has no use for --importance: use clip or gptq, or drop it")
        if self.low_down not in (2, 3, 4):
            raise ApexError(f"the LOW down matrix can have 2, 3 or 4 bits, not {self.low_down}")
        shape = source.layers[0].shape
        columns = {matrix: shape.matrix(matrix)[1] for matrix in MATRICES}
        misfits = [
            f"{matrix} ({k} inputs)" for matrix, k in columns.items() if self.group_size < 1 or k % self.group_size
        ]
        if misfits or self.group_size not in GROUP_SIZES:
            fitting = [g for g in GROUP_SIZES if all(k % g == 0 for k in columns.values())]
            where = (
                f" does not divide {' and '.join(misfits)} of {source.layers[0].module}"
                if misfits
                else " is not usable"
            )
            advice = f"use one of {', '.join(map(str, fitting))}" if fitting else "this model cannot have INT2 twins"
            raise ApexError(f"group size {self.group_size}{where}: {advice}")
        if self.high == "16bit" and source.expert_dtype not in RAW:
            raise ApexError(
                f"the experts of {source.folder} are {source.expert_dtype}: a 16-bit HIGH twin would round them. "
                "Say so with --high bfloat16 or --high float16, or use --high int8"
            )
        high = MatrixFormat(source.expert_dtype if self.high == "16bit" else self.high)
        up, down = MatrixFormat("int2", self.group_size), MatrixFormat(f"int{self.low_down}", self.group_size)
        return Layout(shape, high, high), Layout(shape, up, down)


def convert(
    name: str,
    source: Source,
    folder: Path,
    options: Options,
    progress: Progress,
    moments: Moments | None = None,
    device: str = "cpu",
) -> tuple[Manifest, bool]:
    """Write the apex checkpoint of `source` (called `name` by the user) into `folder`.

    `moments`: those that `options.importance` names. `device` does the arithmetic.

    Returns the manifest, and whether anything was done: a finished checkpoint of the same source and options is left as
    it is. Raises ApexError where `folder` holds anything else, the disk is too small, a weight is not finite, or the moments
    are those of another model.
    """
    high, low = options.layouts(source)
    if moments and moments.fingerprint != source.fingerprint:
        raise ApexError(f"{moments.path} was calibrated on another model than {source.folder}: calibrate this one")
    twins = Twins(high, low, options.low_method, moments, torch.device(device))
    identity = {"version": FORMAT_VERSION, "fingerprint": source.fingerprint, "options": asdict(options)}
    if finished := _finished(folder, identity):
        (folder / JOURNAL).unlink(missing_ok=True)  # a run was killed at its very end
        return finished, False
    with _disk_errors(folder), _Journal(folder, identity) as journal:
        plan = _dense_plan(source)
        _check_space(source, folder, high, low, plan, journal)
        for layer in source.layers:
            if journal.has(_file_names(layer, high, low)):
                progress(layer.experts)
            else:
                files, errors = _write_layer(source, layer, folder, twins, progress)
                journal.add(files, layer.number, errors)
        last = list(plan.values())[-1]
        for dense_name, tensors in plan.items():
            if not journal.has((dense_name,)):
                guard = guard_name(source.layers[0].module) if tensors is last else None
                journal.add({dense_name: _write_dense(source, folder / dense_name, tensors, guard)})
        others = _copy_rest(name, source, folder, plan, high, low)
        manifest = Manifest(
            source=name,
            fingerprint=source.fingerprint,
            options=asdict(options),
            experts=source.layers[0].experts,
            twins=(Twin(low.up.name, low), Twin(high.up.name, high)),
            layers=tuple(
                LayerEntry(layer.number, layer.module, _file_names(layer, high, low)[::-1]) for layer in source.layers
            ),
            dense_bytes=source.dense_bytes,
            files={**journal.files, **others},
            errors=_summary(journal.errors),
            fallbacks=_fallbacks(journal.errors),
        )
        manifest.write(folder)
        journal.remove()
    return manifest, True


def _finished(folder: Path, identity: dict[str, Any]) -> Manifest | None:
    """The manifest of a checkpoint that is complete already; ApexError where it is that of other twins."""
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    found = {"version": FORMAT_VERSION, "fingerprint": manifest.fingerprint, "options": manifest.options}
    _refuse_mix(folder, identity, found)
    return manifest


def _file_names(layer: MoeLayer, high: Layout, low: Layout) -> tuple[str, str]:
    return expert_file_name(layer.number, high.up.name), expert_file_name(layer.number, low.up.name)


@dataclass(frozen=True)
class Twins:
    """How the two blobs of an expert are made."""

    high: Layout
    low: Layout
    method: str
    moments: Moments | None
    device: torch.device

    def make(self, layer: int, e: int, expert: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, list[float]]]:
        """HIGH and LOW blob of expert `e` of the layer with this number; the sums of `make_blob` by "low.down", and by "as.down"
        the index in FALLBACKS of how it was made."""
        weights = {name: weight.to(self.device) for name, weight in expert.items()}
        blobs: list[Tensor] = []
        sums: dict[str, list[float]] = {}
        for twin, layout in (("high", self.high), ("low", self.low)):
            moments = {m: self._moments(layer, e, m) for m in MATRICES} if twin == "low" else {}
            blob, pairs = make_blob(weights, layout, self.method, moments)
            blobs.append(blob)
            sums |= {f"{twin}.{matrix}": pair for matrix, pair in pairs.items()}
            if self.moments and twin == "low":
                sums |= {f"as.{m}": [self._fallback(m, moments[m])] for m in MATRICES}
        return blobs, sums

    def _fallback(self, matrix: str, moments: MatrixMoments | None) -> float:
        if moments is None:
            return 2.0
        return float(self.method == "gptq" and not feeds_back(moments, self.low.format(matrix).group))

    def _moments(self, layer: int, e: int, matrix: str) -> MatrixMoments | None:
        found = self.moments.of(layer, e, matrix) if self.moments else None
        return found and MatrixMoments(found.blocks.to(self.device), found.tokens)


def _write_layer(
    source: Source, layer: MoeLayer, folder: Path, twins: Twins, progress: Progress
) -> tuple[dict[str, FileEntry], dict[str, list[list[float]]]]:
    """Both expert files of a layer. Returns their entries, and `[squared error, squared weight]` of each expert and matrix."""
    names = _file_names(layer, twins.high, twins.low)
    errors: dict[str, list[list[float]]] = {}
    with (
        expert_file(folder / names[0], twins.high, layer.experts) as high_file,
        expert_file(folder / names[1], twins.low, layer.experts) as low_file,
    ):
        for e, expert in enumerate(source.expert(layer)):
            try:
                blobs, sums = twins.make(layer.number, e, expert)
            except ValueError as error:
                raise ApexError(
                    f"{layer.module}, expert {e}: {error}. Nothing sound can be made of it: download the source again, "
                    "or take a sound checkpoint"
                ) from None
            for file, blob in zip((high_file, low_file), blobs, strict=True):
                file.append(blob)
            for kind, pair in sums.items():
                errors.setdefault(kind, []).append(pair)
            progress(1)
    return {names[0]: high_file.entry(), names[1]: low_file.entry()}, errors


def make_blob(
    expert: dict[str, Tensor], layout: Layout, method: str, moments: Mapping[str, MatrixMoments | None] | None = None
) -> tuple[Tensor, dict[str, list[float]]]:
    """One twin of one expert: its blob, uint8 `[stride]` on the CPU, and `[squared error, squared weight]` of each matrix.

    `expert`: "up.weight", "down.weight" `[N, K]` and the biases; `moments` of each matrix, on the same device. Raises ValueError
    naming the matrix that cannot be encoded.
    """
    blob = torch.zeros(layout.stride, dtype=torch.uint8)
    views = layout.views(blob)
    sums = {}
    for matrix in MATRICES:
        weight = expert[f"{matrix}.weight"]
        try:
            fields = encode(weight, layout.format(matrix), method, (moments or {}).get(matrix))
        except ValueError as error:
            raise ValueError(f"the {matrix} matrix {error}") from None
        if layout.shape.bias:
            fields["bias"] = expert[f"{matrix}.bias"]
        for name, value in fields.items():
            views[f"{matrix}.{name}"].copy_(value)
        exact = weight.float().cpu()
        missed = dequantize(views, matrix, layout).sub_(exact)
        sums[matrix] = [_square_sum(missed), _square_sum(exact)]
    return blob, sums


def _square_sum(matrix: Tensor) -> float:
    return matrix.square().sum(dtype=torch.float64).item()


def _summary(errors: dict[int, dict[str, list[list[float]]]]) -> dict[str, Any]:
    """Relative error `|w - twin| / |w|` of each twin and matrix over the whole model, and the worst single matrix of each."""
    summary = {}
    for kind in (f"{twin}.{matrix}" for twin in ("high", "low") for matrix in sorted(MATRICES)):
        rows = [(*pair, number, e) for number in sorted(errors) for e, pair in enumerate(errors[number][kind])]
        ratio, number, expert = max((_ratio(error, weight), number, e) for error, weight, number, e in rows)
        summary[kind] = {
            "error": _ratio(sum(row[0] for row in rows), sum(row[1] for row in rows)),
            "worst": {"error": ratio, "layer": number, "expert": expert},
        }
    return summary


def _fallbacks(errors: dict[int, dict[str, list[list[float]]]]) -> dict[str, int]:
    """How many LOW matrices were not made as asked for, by how they were made instead."""
    made = [int(row[0]) for layer in errors.values() for m in MATRICES for row in layer.get(f"as.{m}", ())]
    return {what: made.count(i) for i, what in enumerate(FALLBACKS) if i and i in made}


def _ratio(error: float, weight: float) -> float:
    return math.sqrt(error / weight) if weight else 0.0


def _dense_plan(source: Source) -> dict[str, list[str]]:
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


def _write_dense(source: Source, path: Path, names: list[str], guard: str | None) -> FileEntry:
    tensors = {name: source.read(name) for name in names}
    if guard:
        tensors[guard] = torch.zeros(1, dtype=torch.bfloat16)
    with atomic_path(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return FileEntry(path.stat().st_size, sha256_of(path))


def _copy_rest(
    name: str, source: Source, folder: Path, plan: dict[str, list[str]], high: Layout, low: Layout
) -> dict[str, FileEntry]:
    """config.json with the quantization entry, a card, the dense index; the source's tokenizer, template and licence files."""
    written: dict[str, bytes] = {}
    for path in sorted({path for pattern in COPIED for path in source.folder.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json"):
            written[str(path.relative_to(source.folder))] = path.read_bytes()
    entry = {
        "quant_method": "apex",
        "version": FORMAT_VERSION,
        "high": high.up.name,
        "low": {matrix: low.format(matrix).name for matrix in MATRICES},
        "group_size": low.up.group,
    }
    config = {**source.config_json, "quantization_config": entry}
    written["config.json"] = json.dumps(config, indent=2).encode()
    written["README.md"] = CARD.format(name=name, high=high.up.name, up=low.up.name, down=low.down.name).encode()
    if len(plan) > 1:
        weight_map = {tensor: file for file, tensors in plan.items() for tensor in tensors}
        weight_map[guard_name(source.layers[0].module)] = list(plan)[-1]
        index = {"metadata": {"total_size": source.dense_bytes}, "weight_map": weight_map}
        written["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    for file, content in written.items():
        with atomic_path(folder / file) as part:
            part.write_bytes(content)
    return {file: FileEntry(len(content), sha256(content).hexdigest()) for file, content in written.items()}


CARD = """# apex checkpoint of {name}

Two twins of every routed expert: HIGH ({high}) and LOW (up {up}, down {down}); everything else as in the source. `apex.json` has
the options, the errors and a checksum of every file. It is read by apex-engine only:

    import apex_engine
    model = apex_engine.load("this folder")
"""


def _check_space(
    source: Source, folder: Path, high: Layout, low: Layout, plan: dict[str, list[str]], journal: _Journal
) -> None:
    needed = 1 << 20  # the small files
    for layer in source.layers:
        if not journal.has(_file_names(layer, high, low)):
            needed += sum(expert_file_bytes(layout, layer.experts) for layout in (high, low))
    for name, tensors in plan.items():
        if not journal.has((name,)):
            needed += sum(source.tensors[tensor].nbytes for tensor in tensors)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ApexError(
            f"{folder} needs {needed:,} more bytes, and its disk has {free:,} free: make room or choose another disk"
        )


# a full disk, a quota, a file-size limit, and places that cannot be written
_DISK_TROUBLE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENOENT,
}


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ApexError(
            f"writing to {folder} failed ({error}): make room and run again, it goes on where it stopped"
        ) from None
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        raise ApexError(
            f"writing to {folder} failed ({os.strerror(error.errno)}): mend that, or choose another directory; "
            "a run goes on where it stopped"
        ) from None


def _refuse_mix(folder: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    if wanted["fingerprint"] != found.get("fingerprint"):
        raise ApexError(f"{folder} holds the twins of another model: choose another directory, or delete this one")
    if wanted != found:
        old, new = found.get("options", {}), wanted["options"]
        changed = ", ".join(f"{k} {old.get(k)} -> {new[k]}" for k in new if old.get(k) != new[k]) or "format version"
        raise ApexError(
            f"{folder} was made with other options ({changed}): choose another directory, delete this one, or ask for the same"
        )


class _Journal:
    """The record of a conversion under way: one line of identity, then one a finished step. Holds a lock on the folder."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._folder, self._path, self._identity = folder, folder / JOURNAL, identity
        self.files: dict[str, FileEntry] = {}
        self.errors: dict[int, dict[str, list[list[float]]]] = {}  # layer -> "low.down" -> expert -> [error, weight]

    def __enter__(self) -> _Journal:
        if self._folder.exists() and not self._folder.is_dir():
            raise ApexError(f"{self._folder} is a file: name a directory to write to")
        if self._folder.is_dir() and any(self._folder.iterdir()) and not self._path.is_file():
            raise ApexError(f"{self._folder} is not empty and holds no unfinished conversion: choose another directory")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+")
        try:
            self._lock()
            for part in self._folder.rglob(f"*{PART}"):  # left by a run that was killed
                part.unlink()
            self._replay()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind and [path for path in self._folder.rglob("*") if path.is_file()] == [self._path]:
            self._path.unlink()  # nothing was achieved: leave the place to other options
            for folder in (self._folder / "experts", self._folder):
                if folder.is_dir():
                    folder.rmdir()
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ended = (
                os.fstat(self._file.fileno()).st_nlink == 0
            )  # the run that had it ended between our open and our lock
        except OSError:
            ended = True
        if ended:
            raise ApexError(f"another run is writing to {self._folder}: wait for it, or choose another directory")

    def _replay(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]  # a last line without its end was cut by a kill: that step is done again
        lines = whole.splitlines()
        if not lines:
            self._file.truncate(0)
            self._append(self._identity)
            return
        _refuse_mix(self._folder, self._identity, json.loads(lines[0]))
        self._file.truncate(len(whole.encode()))
        for line in lines[1:]:
            step = json.loads(line)
            files = {name: FileEntry(n, sha, tuple(blobs)) for name, (n, sha, blobs) in step["files"].items()}
            if all(self._on_disk(name, entry) for name, entry in files.items()):
                self._record(files, step["layer"], step["errors"])

    def _on_disk(self, name: str, entry: FileEntry) -> bool:
        path = self._folder / name
        return path.is_file() and path.stat().st_size == entry.nbytes

    def _record(self, files: dict[str, FileEntry], layer: int | None, errors: dict[str, list[list[float]]]) -> None:
        self.files |= files
        if layer is not None:
            self.errors[layer] = errors

    def has(self, names: tuple[str, ...]) -> bool:
        return all(name in self.files for name in names)

    def add(
        self, files: dict[str, FileEntry], layer: int | None = None, errors: dict[str, list[list[float]]] | None = None
    ) -> None:
        """Record finished files; `layer` and its `errors` for expert files."""
        rows = {name: [entry.nbytes, entry.sha256, entry.blobs] for name, entry in files.items()}
        self._append({"files": rows, "layer": layer, "errors": errors or {}})
        self._record(files, layer, errors or {})

    def _append(self, step: dict[str, Any]) -> None:
        self._file.write(json.dumps(step) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
