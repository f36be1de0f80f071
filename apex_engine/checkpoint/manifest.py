"""The apex checkpoint on disk: what is in it, as its manifest says. Written by the quantizer, read by the runtime.

    config.json ...                       the source's own files, `quantization_config` added
    model-00001-of-0000N.safetensors      the dense part, tensors as in the source
    experts/layer-007.int2.safetensors    one twin of the experts of a layer (expert_file.py)
    apex.json                             the manifest, written last: without it the checkpoint is unfinished

Every routed expert is there in several forms, its twins. They stand in one order everywhere, fewest bytes first, and the rest of
the project knows a twin by its place in that order, counted from 1: its precision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.atomic import atomic_file, sha256_of
from apex_engine.checkpoint.twin import Twin
from apex_engine.checkpoint.version1 import as_of_now
from apex_engine.core.vocabulary import Geometry, Words
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import Layout

FORMAT_VERSION = 2
READABLE = (1, 2)
MANIFEST = "apex.json"


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says of one file. `blobs`: crc32 of each expert's blob, in order; empty for other files."""

    nbytes: int
    sha256: str
    blobs: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerEntry:
    """One MoE layer: its number in the model, the module path, and its expert files (relative to the checkpoint), one for each
    twin, in the order of the twins."""

    number: int
    module: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime needs to know of a finished checkpoint."""

    source: str  # as the user named it
    fingerprint: str  # of the source's config and weights
    options: dict[str, Any]
    experts: int  # routed experts a layer
    twins: tuple[Twin, ...]  # fewest bytes first
    layers: tuple[LayerEntry, ...]
    dense_bytes: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    errors: dict[str, Any] = field(default_factory=dict)  # relative error by "int2.down", and the worst expert
    fallbacks: dict[str, int] = field(
        default_factory=dict
    )  # grouped matrices made in a simpler way, for want of tokens

    @property
    def precisions(self) -> range:
        """Of its twins, lowest first."""
        return range(1, len(self.twins) + 1)

    @property
    def words(self) -> Words:
        """What precisions are called."""
        return Words.of([twin.name for twin in self.twins])

    def layout(self, precision: int) -> Layout:
        return self.twins[precision - 1].layout

    @property
    def strides(self) -> dict[int, int]:
        """Bytes of a blob of each twin."""
        return {precision: self.layout(precision).stride for precision in self.precisions}

    @property
    def geometry(self) -> Geometry:
        """What decisions know of it."""
        return Geometry(len(self.layers), self.experts, (0, *self.strides.values()))

    def file(self, layer: int, precision: int) -> str:
        """The expert file of MoE layer `layer`, counted from 0."""
        return self.layers[layer].files[precision - 1]

    def write(self, folder: Path) -> None:
        content = {
            "format": "apex",
            "version": FORMAT_VERSION,
            "source": self.source,
            "fingerprint": self.fingerprint,
            "options": self.options,
            "experts": self.experts,
            "twins": [{"name": twin.name, "layout": twin.layout.describe()} for twin in self.twins],
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
        """Raises ApexError where `folder` holds no finished checkpoint of a known version, or a file is missing or short."""
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
            if content["version"] not in READABLE:
                raise ApexError(
                    f"{path} has format version {content['version']}, this is version {FORMAT_VERSION}: delete "
                    f"{folder} and quantize again"
                )
            manifest = cls._parse(as_of_now(content) if content["version"] == 1 else content)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ApexError(
                f"{path} is damaged ({error!r}): copy it again, or delete {folder} and quantize again"
            ) from None
        manifest._check_files(folder)
        return manifest

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        twins = tuple(Twin(twin["name"], Layout.parse(twin["layout"])) for twin in content["twins"])
        layers = tuple(LayerEntry(row["number"], row["module"], tuple(row["files"])) for row in content["layers"])
        if not twins or any(len(layer.files) != len(twins) for layer in layers):
            raise ValueError("files of the twins")
        return cls(
            source=content["source"],
            fingerprint=content["fingerprint"],
            options=content["options"],
            experts=content["experts"],
            twins=twins,
            layers=layers,
            dense_bytes=content["dense_bytes"],
            errors=content["errors"],
            fallbacks=content.get("fallbacks", {}),
            files={
                name: FileEntry(entry["nbytes"], entry["sha256"], tuple(entry["blobs"]))
                for name, entry in content["files"].items()
            },
        )

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
