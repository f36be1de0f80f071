"""The apex checkpoint on disk: names, the expert file, the manifest. Written by the quantizer, read by the runtime.

    config.json ...                       the source's own files, `quantization_config` added
    model-00001-of-0000N.safetensors      the dense part, tensors as in the source
    experts/layer-007.int2.safetensors    one uint8 tensor "experts" [E, stride], row e = blob of expert e
    apex.json                             the manifest, written last: without it the checkpoint is unfinished

In an expert file the tensor's data starts at a multiple of 4096 (the JSON header is padded with spaces, which safetensors
allows) and so does every blob.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from apex_engine.kernels.layout import ALIGN, Layout
from apex_engine.vocabulary import ApexError

FORMAT_VERSION = 1
MANIFEST = "apex.json"
TENSOR = "experts"  # name of the one tensor in an expert file


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says of one file. `blobs`: crc32 of each expert's blob, in order; empty for other files."""

    nbytes: int
    sha256: str
    blobs: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerEntry:
    """One MoE layer: its number in the model, the module path, and its two expert files (relative to the checkpoint)."""

    number: int
    module: str
    high: str
    low: str


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime needs to know of a finished checkpoint."""

    source: str  # as the user named it
    fingerprint: str  # of the source's config and weights
    options: dict[str, Any]
    experts: int  # routed experts a layer
    high: Layout
    low: Layout
    layers: tuple[LayerEntry, ...]
    dense_bytes: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    errors: dict[str, Any] = field(default_factory=dict)  # relative error by twin and matrix, and the worst tensors
    fallbacks: dict[str, int] = field(default_factory=dict)  # LOW matrices made in a simpler way, for want of tokens

    def write(self, folder: Path) -> None:
        content = {
            "format": "apex",
            "version": FORMAT_VERSION,
            "source": self.source,
            "fingerprint": self.fingerprint,
            "options": self.options,
            "experts": self.experts,
            "high": self.high.describe(),
            "low": self.low.describe(),
            "layers": [asdict(layer) for layer in self.layers],
            "dense_bytes": self.dense_bytes,
            "errors": self.errors,
            "fallbacks": self.fallbacks,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }
        with atomic_file(folder / MANIFEST) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ApexError where `folder` holds no finished checkpoint of this version, or a file is missing or short."""
        path = folder / MANIFEST
        if not path.is_file():
            raise ApexError(
                f"{folder} is not a finished apex checkpoint: it has no {MANIFEST}. Make one with "
                "`python -m apex_engine.quantize SOURCE` (a run that was cut short goes on where it stopped); "
                "a copy from a hub must be downloaded whole"
            )
        try:
            content = json.loads(path.read_text())
            if not isinstance(content["experts"], int):
                raise TypeError("experts")
            if content["version"] != FORMAT_VERSION:
                raise ApexError(
                    f"{path} has format version {content['version']}, this is version {FORMAT_VERSION}: delete "
                    f"{folder} and quantize again"
                )
            manifest = cls(
                source=content["source"],
                fingerprint=content["fingerprint"],
                options=content["options"],
                experts=content["experts"],
                high=Layout.parse(content["high"]),
                low=Layout.parse(content["low"]),
                layers=tuple(LayerEntry(**layer) for layer in content["layers"]),
                dense_bytes=content["dense_bytes"],
                errors=content["errors"],
                fallbacks=content.get("fallbacks", {}),
                files={
                    name: FileEntry(entry["nbytes"], entry["sha256"], tuple(entry["blobs"]))
                    for name, entry in content["files"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ApexError(
                f"{path} is damaged ({error!r}): copy it again, or delete {folder} and quantize again"
            ) from None
        manifest._check_files(folder)
        return manifest

    def _check_files(self, folder: Path) -> None:
        for name, entry in self.files.items():
            if not name.endswith(".safetensors"):
                continue  # a model card may be edited
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != entry.nbytes:
                what = "is missing" if found is None else f"has {found:,} bytes instead of {entry.nbytes:,}"
                raise ApexError(f"{path} {what}: copy it again, or delete {folder} and quantize again")


def guard_name(module: str) -> str:
    """Name of a tensor in the dense part that makes transformers refuse the checkpoint where apex_engine is not imported.

    Without it, an unknown quantization method is ignored there with a warning, and the experts are random. It stands under
    the name of an expert parameter of the first MoE layer, in a shape that does not fit.
    """
    return f"{module}.down_proj"


def verify(folder: Path, progress: Callable[[str], None]) -> None:
    """Read every file of a finished checkpoint and compare its sha256. Raises ApexError naming the first that differs."""
    for name, entry in Manifest.read(folder).files.items():
        progress(name)
        if not (folder / name).is_file() or sha256_of(folder / name) != entry.sha256:
            raise ApexError(
                f"{folder / name} is not as it was written: copy it again, or delete {folder} and quantize again"
            )


def expert_file_name(number: int, form: str) -> str:
    return f"experts/layer-{number:03d}.{form}.safetensors"


class ExpertFileWriter:
    """Writes one expert file, blob by blob in order of the experts. Use through `expert_file`."""

    def __init__(self, file: BinaryIO, layout: Layout, experts: int) -> None:
        self._file, self._layout, self._experts = file, layout, experts
        self._sha = hashlib.sha256()
        self._blobs: list[int] = []
        self._nbytes = 0
        self._write(_header(layout, experts))

    def append(self, blob: Tensor) -> None:
        """`blob`: uint8 `[stride]` on the CPU."""
        data = blob.numpy().data
        self._blobs.append(zlib.crc32(data))
        self._write(data)

    def entry(self) -> FileEntry:
        assert len(self._blobs) == self._experts, f"{len(self._blobs)} of {self._experts} experts written"
        return FileEntry(self._nbytes, self._sha.hexdigest(), tuple(self._blobs))

    def _write(self, data: bytes | memoryview) -> None:
        self._nbytes += self._file.write(data)
        self._sha.update(data)


@contextmanager
def expert_file(path: Path, layout: Layout, experts: int) -> Iterator[ExpertFileWriter]:
    """The file gets its final name when the block ends without an error; else nothing is left of it."""
    with atomic_file(path) as file:
        yield ExpertFileWriter(file, layout, experts)


def expert_file_bytes(layout: Layout, experts: int) -> int:
    return len(_header(layout, experts)) + experts * layout.stride


def _header(layout: Layout, experts: int) -> bytes:
    header = {
        "__metadata__": {"format": "apex", "version": str(FORMAT_VERSION), "layout": json.dumps(layout.describe())},
        TENSOR: {
            "dtype": "U8",
            "shape": [experts, layout.stride],
            "data_offsets": [0, experts * layout.stride],
        },
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def data_offset(path: Path, layout: Layout, experts: int) -> int:
    """Byte at which the first blob of an expert file starts. Raises ApexError where its header is not the expected one."""
    expected = _header(layout, experts)
    try:
        with path.open("rb") as file:
            found = file.read(len(expected))
    except OSError as error:
        raise ApexError(f"{path} cannot be read ({error.strerror}): copy it again, or mend its permissions") from None
    if found != expected:
        raise ApexError(f"{path} is no expert file of this checkpoint: copy it again, or quantize again")
    return len(expected)


PART = ".part"  # suffix of a file that is still being written


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A name to write to; what is there when the block ends appears under `path`, whole and on disk, or not at all."""
    part = path.with_name(path.name + PART)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)  # safetensors writes files that only their owner can read
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """`atomic_path`, opened for writing."""
    with atomic_path(path) as part, part.open("wb") as file:
        yield file


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
