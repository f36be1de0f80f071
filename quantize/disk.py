"""What can go wrong with the disk that is written to, in one line each."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from apex_engine.errors import ApexError

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
def disk_errors(folder: Path) -> Iterator[None]:
    """What fails inside for want of room or of permission is an ApexError."""
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


def check_space(folder: Path, needed: int) -> None:
    """Raises ApexError where the disk of `folder` has less than `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ApexError(
            f"{folder} needs {needed:,} more bytes, and its disk has {free:,} free: make room or choose another disk"
        )
