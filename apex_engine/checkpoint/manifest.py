"""The apex checkpoint on disk: names, the expert file, the manifest. Written by the quantizer, read by the runtime.

    config.json ...                       the source's own files, `quantization_config` added
    model-00001-of-0000N.safetensors      the dense part, tensors as in the source
    experts/layer-007.int2.safetensors    one uint8 tensor "experts" [E, stride], row e = blob of expert e
    apex.json                             the manifest, written last: without it the checkpoint is unfinished

In an expert file the tensor's data starts at a multiple of 4096 (the JSON header is padded with spaces, which safetensors
allows) and so does every blob.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.atomic import atomic_file, sha256_of
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import Layout

FORMAT_VERSION = 1
MANIFEST = "apex.json"


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
