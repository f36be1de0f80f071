"""Options of the commands that hold an engine beside its reference. Nothing heavy is imported here, for the sake of --help."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_pair_options(p: argparse.ArgumentParser, tokens: str, default: int) -> None:
    """What both are and the text they read; `tokens` is the option that says how much of it."""
    p.add_argument("model", nargs="?", help="an apex checkpoint; default, and `tiny`: the bundled model")
    p.add_argument(
        "--reference",
        type=Path,
        metavar="FOLDER",
        help="a Hugging Face model to compare with, through transformers; default: all HIGH twins of the same checkpoint",
    )
    text = p.add_argument_group("text")
    text.add_argument(
        "--text",
        nargs="+",
        metavar="TEXT",
        help="files or datasets (owner/name:config:split); default: wikitext, or the held-out text of the bundled model",
    )
    text.add_argument(tokens, type=int, default=default, help="of each text; default: %(default)s")
    text.add_argument("--length", type=int, default=256, help="tokens of a window; default: %(default)s")
