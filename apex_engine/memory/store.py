"""The twins on disk: read straight into the memory given, whole or in parts.

Reads go past the page cache (O_DIRECT) where the file system allows it: the file cache would otherwise hold a second copy of
the experts, and make every measured load look free. Each blob's checksum is compared the first time it was read.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apex_engine.checkpoint.expert_file import data_offset
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.core.vocabulary import ExpertId, Precision
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import Layout

FLAGS = os.O_RDONLY | os.O_CLOEXEC


class ExpertStore:
    """The expert files of a finished checkpoint, open for reading. `direct`: whether the page cache is bypassed.

    `check`: whether checksums are compared; a benchmark of reads leaves them out.
    """

    def __init__(self, folder: Path, manifest: Manifest, check: bool = True) -> None:
        self._folder, self._manifest, self._check = folder, manifest, check
        self._verified: set[tuple[ExpertId, Precision]] = set()
        # (layer, precision) -> fd, data offset, name
        self._files: dict[tuple[int, Precision], tuple[int, int, str]] = {}
        self.close = weakref.finalize(self, _close, self._files)  # also when the model is dropped
        self.direct = True
        self._switch = threading.Lock()  # from direct to buffered reads
        try:
            for layer in range(len(manifest.layers)):
                for precision in manifest.precisions:
                    self._open(layer, precision)
        except BaseException:
            self.close()
            raise

    def layouts(self) -> dict[Precision, Layout]:
        """Of every twin."""
        return {precision: self._manifest.layout(precision) for precision in self._manifest.precisions}

    def read(self, expert: ExpertId, precision: Precision, part: NDArray[np.uint8], start: int = 0) -> None:
        """Fill `part`, at a multiple of 4096, with the blob's bytes from `start` on.

        Raises ApexError naming layer, expert, precision and file where the read fails or ends early; `part` then holds nothing
        valid. Any number of threads may read at a time.
        """
        fd, offset, name = self._files[expert.layer, precision]
        buffer, stride = part.data, self._manifest.layout(precision).stride
        position = offset + expert.expert * stride + start
        direct = self.direct
        try:
            try:
                done = _read(fd, buffer, position)
            except OSError as error:
                # Some file systems accept O_DIRECT and then refuse the reads, perhaps several threads' at a time.
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._stop_direct()
                done = _read(fd, buffer, position)
        except OSError as error:
            raise self._error(expert, precision, name, os.strerror(error.errno or 0)) from None
        if done < len(buffer):
            raise self._error(expert, precision, name, f"the file ends after {start + done:,} of {stride:,} bytes")

    def verify(self, expert: ExpertId, precision: Precision, blob: NDArray[np.uint8]) -> None:
        """Compare a whole blob's checksum, the first time only. Raises ApexError where other bytes were written."""
        if not self._check or (expert, precision) in self._verified:
            return
        name = self._files[expert.layer, precision][2]
        if zlib.crc32(blob.data) != self._manifest.files[name].blobs[expert.expert]:
            raise self._error(expert, precision, name, "its bytes are not the ones that were written (wrong checksum)")
        self._verified.add((expert, precision))

    def _open(self, layer: int, precision: Precision) -> None:
        name = self._manifest.file(layer, precision)
        path = self._folder / name
        offset = data_offset(path, self._manifest.layout(precision), self._manifest.experts)
        try:
            fd = os.open(path, FLAGS | getattr(os, "O_DIRECT", 0))
            self.direct = self.direct and hasattr(os, "O_DIRECT")
        except OSError:  # tmpfs and some network file systems
            fd = os.open(path, FLAGS)
            self.direct = False
        self._files[layer, precision] = fd, offset, name

    def _stop_direct(self) -> None:
        with self._switch:
            if not self.direct:
                return
            for fd, _, name in self._files.values():
                plain = os.open(self._folder / name, FLAGS)
                os.dup2(plain, fd)  # under the number everyone has
                os.close(plain)
            self.direct = False  # last: whoever sees it reads by the new files

    def _error(self, expert: ExpertId, precision: Precision, name: str, what: str) -> ApexError:
        layer = self._manifest.layers[expert.layer]
        word = self._manifest.words[precision].upper()
        return ApexError(
            f"layer {layer.number} ({layer.module}), expert {expert.expert}, {word} twin cannot be read from "
            f"{self._folder / name}: {what}. Copy the checkpoint again, or quantize again"
        )


def _read(fd: int, buffer: memoryview, position: int) -> int:
    """Bytes read: fewer than asked for only where the file ends."""
    done = 0
    while done < len(buffer) and (got := os.preadv(fd, [buffer[done:]], position + done)):
        done += got
    return done


def _close(files: dict[tuple[int, Precision], tuple[int, int, str]]) -> None:
    for fd, _, _ in files.values():
        os.close(fd)
    files.clear()
