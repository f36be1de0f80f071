"""Shared fixtures: converted tiny models, made once a session."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.cli.console import run
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import ALIASES
from models import save_model

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def quantize(source: Path, folder: Path, **options: Any) -> Manifest:
    manifest, _ = convert(source.name, Source(source), folder, Options(**options), lambda n: None)
    return manifest


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def bundled() -> Path:
    return Path(ALIASES["tiny"])


@pytest.fixture(scope="session")
def bundled_apex(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundled") / "apex"
    quantize(bundled, folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(source, apex checkpoint) of a tiny random model of a family, by the arguments of `save_model`; made once each."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str = "mixtral", **changes: Any) -> tuple[Path, Path]:
        key = f"{family}{sorted(changes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            source = save_model(folder / "source", family, **changes)
            quantize(source, folder / "apex")
            made[key] = source, folder / "apex"
        return made[key]

    return make


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """Run a command's `main` in this process, as its module does: (exit code, stdout, stderr)."""

    def call(main: Callable[[list[str]], object], *args: Any, stdin: str | None = None) -> tuple[Any, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            run(lambda: main([*map(str, args)]))
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


@pytest.fixture(scope="session")
def source(tiny: Callable[..., tuple[Path, Path]]) -> Path:
    """A tiny Mixtral of three layers, to be quantized."""
    return tiny(num_hidden_layers=3)[0]


@pytest.fixture(scope="session")
def finished(tiny: Callable[..., tuple[Path, Path]]) -> Path:
    """Its apex checkpoint: to be read, and copied before it is spoiled."""
    return tiny(num_hidden_layers=3)[1]
