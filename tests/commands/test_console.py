"""How commands fail and what they draw."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from apex_engine.cli import console
from apex_engine.errors import human

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_system_refuses_is_one_line(command):
    def main(arguments):
        raise PermissionError(13, "Permission denied", "/a/shard")

    assert command(main) == (2, "", "error: /a/shard: Permission denied\n")


def test_a_full_disk():
    """In a process of its own: what is left in the buffer is written at its exit."""
    command = [sys.executable, "-m", "apex_engine", "--version"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "error: No space left on device\n"


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal was sent."""
    file = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=file, force_terminal=True, width=100))
    return file


def test_bars_of_loading_go_when_they_are_full(terminal):
    with console.loading_bars() as told:
        for done in range(4):
            told("filling the host tier", done, 3)
            told("warming up", done, 9)
    text = terminal.getvalue()
    assert "filling the host tier" in text and text.endswith("\x1b[2K")  # the last line was wiped


def test_the_bars_end_with_an_error(terminal):
    with pytest.raises(ValueError, match="disk"), console.loading_bars() as told:
        told("filling the host tier", 1, 3)
        raise ValueError("disk")
    assert terminal.getvalue().endswith("\x1b[2K") and "\x1b[?25h" in terminal.getvalue()  # the cursor is back


def test_progress_counts_steps(terminal):
    with console.progress("recording", 5) as advance:
        advance(2)
        advance(3)
    assert "5/5" in terminal.getvalue()


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/usr/bin/apex", "apex generate"),
        ("/x/apex_engine/__main__.py", "python -m apex_engine generate"),
        ("/x/apex_engine/generate.py", "python -m apex_engine.generate"),
        ("/x/quantize/__main__.py", "python -m apex_engine.generate"),
        ("-c", "python -m apex_engine.generate"),
    ],
)
def test_usage_lines_call_a_command_as_its_user_did(called, name):
    assert console.program("generate", called) == name


def test_human():
    assert [human(n) for n in (0, 1023, 1536, 6 << 30, 3 << 41)] == ["0 B", "1023 B", "1.5 KiB", "6.0 GiB", "6.0 TiB"]


def test_nothing_is_drawn_where_nothing_took_long(terminal):
    with console.loading_bars():
        pass
    assert terminal.getvalue() == ""
