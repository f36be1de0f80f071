"""The quantizer with a progress bar, and what its twins cost as a table."""

from __future__ import annotations

from pathlib import Path

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.checkpoint.moments import Moments
from apex_engine.cli.console import console, progress_bar, say
from apex_engine.cli.twin_table import twin_lines, twin_table
from apex_engine.quantize.convert import convert
from apex_engine.quantize.journal import JOURNAL
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import resolve


def quantize(
    name: str, folder: Path, options: Options, moments: Moments | None = None, device: str = "cpu"
) -> Manifest:
    """`convert` with a progress bar and the table at the end, on stderr."""
    source = Source(resolve(name))
    resumes = (folder / JOURNAL).is_file()
    total = sum(layer.experts for layer in source.layers)
    bar = progress_bar("quantizing experts")
    task = bar.add_task("", total=total)

    def advance(experts: int) -> None:
        if not bar.live.is_started:  # only now: what is refused before the first expert is refused in one line
            if resumes:
                say(f"going on with the unfinished conversion in {folder}")
            bar.start()
        bar.advance(task, experts)

    try:
        manifest, done = convert(name, source, folder, options, advance, moments, device)
    except KeyboardInterrupt:
        say("what is finished is kept: run the same command again, it goes on where it stopped")
        raise
    finally:
        if bar.live.is_started:
            bar.stop()
    if done:
        for note in source.notes:
            say(f"note: {note}")
        console.print(twin_table(manifest))
        for line in twin_lines(manifest):
            say(line)
        say(f"written to {folder}")
    else:
        say(f"{folder} is complete already: nothing to do")
    return manifest
