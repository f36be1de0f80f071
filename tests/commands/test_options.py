"""The engine's options: from the fields of `Config` to the command line, its help and the README."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from apex_engine.cli.options import add_engine_options, engine_config, markdown
from apex_engine.config import SYSTEMS, Config, command_line
from apex_engine.errors import flag

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parser():
    p = argparse.ArgumentParser(prog="x")
    add_engine_options(p, mode="deterministic", prefetch="always 0 here")
    return p


def test_the_readme_has_the_options_as_they_are():
    """`python -m apex_engine.cli.options` prints what belongs there."""
    text = (ROOT / "README.md").read_text()
    for table in markdown().split("\n\n"):
        assert table.strip() in text
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(command_line()) + 1  # --system


def test_every_field_but_context_is_an_option(parser):
    shown = parser.format_help()
    names = {each.name for each in fields(Config)} - {"context"}
    assert {each.name for each in command_line()} == names
    basic, advanced = shown.split("engine, advanced:")
    for each in command_line():
        assert f"{flag(each.name)} " in (basic if each.metadata["group"] == "basic" else advanced)
    assert (
        "default: 25%" in shown and "default: always 0 here" in shown and "--system {default,apex,on-demand}" in shown
    )


def test_what_is_given_becomes_the_config(parser):
    cpu = torch.device("cpu")
    assert engine_config(parser.parse_args([]), cpu) == Config()
    given = "--mode deterministic --memory 1GiB --t1 .4 --low-share .3 --prefetch 2 --governor off --kernels torch --link 1GB/s"
    assert engine_config(parser.parse_args(given.split()), cpu) == Config(
        mode="deterministic",
        memory="1GiB",
        t1=0.4,
        low_share=0.3,
        prefetch=2,
        governor="off",
        kernels="torch",
        link="1GB/s",
    )
    assert engine_config(parser.parse_args(["--low-share", "floor"]), cpu).low_share == "floor"
    for name, preset in SYSTEMS.items():
        assert engine_config(parser.parse_args(["--system", name]), cpu) == Config(**preset)
    assert engine_config(parser.parse_args(["--system", "apex"]), cpu, prefetch=0).prefetch == 0
