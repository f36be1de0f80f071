"""The file that holds one twin of every expert of a layer: one uint8 tensor "experts" [E, stride], row e = blob of expert e.

The tensor's data starts at a multiple of 4096 (the JSON header is padded with spaces, which safetensors allows) and so does every
blob.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from apex_engine.checkpoint.atomic import atomic_file
from apex_engine.checkpoint.manifest import FileEntry
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import ALIGN, Layout

FILE_VERSION = 1
TENSOR = "experts"  # name of the one tensor in an expert file


def expert_file_name(number: int, form: str) -> str:
    """The file of the layer with this number in the model, for the twin called `form`."""
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
        "__metadata__": {"format": "apex", "version": str(FILE_VERSION), "layout": json.dumps(layout.describe())},
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
