"""apex verify CHECKPOINT: read a checkpoint whole, and compare its checksums."""

from __future__ import annotations

import argparse
from pathlib import Path

from apex_engine.cli.console import progress_bar, say


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="apex verify",
        description="Read every file of an apex checkpoint and compare its sha256 with the one in its manifest.",
    )
    p.add_argument("checkpoint", type=Path, help="folder written by `python -m apex_engine.quantize`")
    return p


def main(arguments: list[str] | None = None) -> None:
    verify_checkpoint(parser().parse_args(arguments).checkpoint)


def verify_checkpoint(folder: Path) -> None:
    """`verify` with a progress bar on stderr. Raises ApexError naming the first file that is not as it was written."""
    from apex_engine.checkpoint.manifest import Manifest, verify  # not for --help

    bar = progress_bar("reading files")
    task = bar.add_task("", total=len(Manifest.read(folder).files), completed=-1)
    with bar:
        verify(folder, lambda _: bar.advance(task))
        bar.advance(task)
    say(f"{folder} is as it was written")
