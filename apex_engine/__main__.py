"""The `apex` command, also `python -m apex_engine`: a table of sub-commands, each imported when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, NoReturn

from apex_engine.cli.console import program, run
from apex_engine.errors import ApexError


class Command(NamedTuple):
    """A sub-command: the module whose `main` takes its arguments, and one line of help."""

    module: str
    meaning: str


COMMANDS = {
    "quantize": Command("apex_engine.quantize.__main__", "write an apex checkpoint of a Hugging Face model"),
    "generate": Command("apex_engine.generate", "text from an apex checkpoint, under a memory budget, with its ledger"),
    "calibrate": Command("apex_engine.calibrate", "measure what LOW twins cost, and choose thresholds for a limit"),
    "perplexity": Command(
        "apex_engine.perplexity", "perplexity of a text, and how far the engine is from its reference"
    ),
    "eval": Command("apex_engine.eval.__main__", "lm-eval's tasks on the engine and on its reference, item by item"),
    "info": Command("apex_engine.cli.info", "what is in an apex checkpoint"),
    "verify": Command("apex_engine.cli.verifying", "read an apex checkpoint and compare its checksums"),
}


def parser() -> argparse.ArgumentParser:
    table = "\n".join(f"  {name:12}{command.meaning}" for name, command in COMMANDS.items())
    name = program("")
    p = argparse.ArgumentParser(
        prog=name,
        usage=f"{name} [-h] [--version] COMMAND ...",
        description="Runs Mixture-of-Experts language models that do not fit in fast memory.",
        epilog=f"commands:\n{table}\n\n`{name} COMMAND --help` says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--version", action="store_true", help="show the version and exit")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Run the sub-command that comes first in `arguments` (default: of the process). Raises ApexError for an unknown one."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and not given[0].startswith("-"):
        call: Callable[[list[str]], object] = import_module(_command(given[0]).module).main
        call(given[1:])
    elif parser().parse_args(given).version:
        print(f"apex-engine {_version()}")
    else:
        parser().print_help()


def _command(name: str) -> Command:
    if name not in COMMANDS:
        near = get_close_matches(name.lower(), COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ApexError(f"unknown command {name}: {hint}Commands are {', '.join(COMMANDS)}")
    return COMMANDS[name]


def _version() -> str:
    try:
        return version("apex-engine")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def entry() -> NoReturn:
    """The console script."""
    run(main)


if __name__ == "__main__":
    entry()
