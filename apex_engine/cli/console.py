"""What every command of the project shares: how it fails, and where it talks.

Text that is the command's result goes to stdout; plans, bars, tables and errors go to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from apex_engine.errors import ApexError, first_line

console = Console(stderr=True, highlight=False)


def run(main: Callable[[], object]) -> NoReturn:
    """Exit with 0, with 2 and one line for the user's mistakes and what the system refuses, with 130 after Ctrl-C. Other errors
    keep their traceback."""
    try:
        main()
        if sys.stdout:  # not where it was closed, as by `>&-`
            sys.stdout.flush()
    except ApexError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe went away, as `| head` does
        _drop_stdout()
        sys.exit(141)
    except OSError as error:  # a full disk, missing permissions: what it says is all there is to know
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or first_line(error)}", file=sys.stderr)
        if not where:  # stdout itself
            _drop_stdout()
        sys.exit(2)
    sys.exit(0)


def program(name: str, called: str | None = None) -> str:
    """What usage lines call the command `name`: the way its user did, which is in `called`, by default sys.argv[0]."""
    path = Path(sys.argv[0] if called is None else called)
    if path.stem == "apex":
        return f"apex {name}".strip()
    if (path.parent.name, path.name) == ("apex_engine", "__main__.py"):
        return f"python -m apex_engine {name}".strip()
    return f"python -m apex_engine.{name}"


def _drop_stdout() -> None:
    """What is left in the buffer of stdout cannot be written, and must not be tried again at exit."""
    if sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress_bar(what: str, transient: bool = False) -> Progress:
    """A bar on stderr with counts and times, not started and without a task; one that is `transient` goes when it ends."""
    columns = [
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    ]
    return Progress(*columns, console=console, transient=transient)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar while the block lasts; call what it gives with the number of steps made."""
    with progress_bar(what) as bar:
        task = bar.add_task("", total=total)
        yield lambda steps: bar.advance(task, steps)


@contextmanager
def loading_bars() -> Iterator[Callable[[str, int, int], None]]:
    """What `apex_engine.load` may be given as `progress`, (what, done, total), while the block lasts: a transient bar for each
    `what`, from its first call on."""
    bar = progress_bar("{task.description}", transient=True)
    tasks: dict[str, TaskID] = {}

    def told(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bar.start()  # again, it does nothing
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total, visible=done < total)

    try:
        yield told
    finally:
        if tasks:
            bar.stop()


def say(text: str) -> None:
    """A message on stderr: wrapped at words on a terminal, one line elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal, markup=False)


def quieten() -> None:
    """No bars and no advice from transformers: what is shown is this project's."""
    from transformers.utils import logging as transformers_logging  # not for `--help`

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
