"""The `apex` command: a table of the others."""

import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from apex_engine.__main__ import COMMANDS, entry, main

ROOT = Path(__file__).resolve().parents[2]
THERE = [name for name, command in COMMANDS.items() if find_spec(command.module)]


def test_help_lists_every_command(command):
    for arguments in ((), ("--help",)):
        code, out, _ = command(main, *arguments)
        assert code == 0
        for name, row in COMMANDS.items():
            assert f"  {name} " in out and row.meaning in out


def test_version(command):
    code, out, _ = command(main, "--version")
    assert code == 0 and out.startswith("apex-engine ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate", "x"], "unknown command genrate: did you mean generate? Commands are quantize, generate"),
        (["xyzzy"], "unknown command xyzzy: Commands are"),
        (["--polcy"], "unrecognized arguments: --polcy"),
    ],
)
def test_what_is_unknown_ends_with_2(command, arguments, message):
    code, out, err = command(main, *arguments)
    assert (code, out) == (2, "") and message in err


@pytest.mark.parametrize("name", THERE)
def test_the_rest_of_the_arguments_goes_to_the_command(command, name):
    code, out, _ = command(main, name, "--help")
    assert code == 0 and out.startswith("usage: ") and name in out.splitlines()[0]
    module = import_module(COMMANDS[name].module)
    assert command(module.main, "--help")[1] == out
    code, _, err = command(main, name, "--xyzzy", "tiny")
    assert code == 2 and "--xyzzy" in err


def test_a_commands_mistakes_are_one_line(command, tmp_path):
    code, out, err = command(main, "generate", tmp_path / "nothing", "hello")
    assert (code, out) == (2, "") and err.startswith("error: ") and "is no directory" in err


def test_the_console_script_is_this_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["apex"].partition(":")
    assert getattr(import_module(module), name) is entry
