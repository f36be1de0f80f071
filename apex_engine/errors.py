"""The one error a user can mend, and what its messages are made of. Imports nothing of this project."""

from __future__ import annotations


class ApexError(Exception):
    """Something the user can mend: the message says what, where, and what to do. Commands print it and exit with 2."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def flag(name: str) -> str:
    """max_length -> --max-length."""
    return f"--{name.replace('_', '-')}"


def human(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def check_seed(seed: int) -> None:
    """Raises ApexError for what numpy takes for no seed."""
    if not 0 <= seed < 2**32:
        raise ApexError(f"--seed {seed} is out of range: from 0 to {2**32 - 1}")
