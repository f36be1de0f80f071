"""Files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from apex_engine.errors import ApexError

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


def check_writable(path: Path) -> None:
    """Raises ApexError where a file `path` cannot be written, its missing folders made."""
    there = next(some for some in path.absolute().parents if some.exists())
    if path.is_dir():
        raise ApexError(f"{path} cannot be written: {path} is a directory")
    if not there.is_dir():
        raise ApexError(f"{path} cannot be written: {there} is no directory")
    if not os.access(there, os.W_OK):
        raise ApexError(f"{path} cannot be written: no permission to write to {there}")
