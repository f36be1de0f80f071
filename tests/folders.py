"""What is in a folder."""

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file in it, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
