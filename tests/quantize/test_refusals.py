"""What the quantizer refuses, and that nothing is left of it."""

import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import quantize
from folders import contents

from apex_engine.checkpoint.manifest import MANIFEST
from apex_engine.errors import ApexError
from models import make_model, save_model


@pytest.fixture(scope="module")
def source(tiny):
    return tiny(num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def finished(tiny):
    return tiny(num_hidden_layers=3)[1]


@pytest.mark.parametrize("group", [-1, 0, 38, 512])
def test_group_sizes_that_do_not_fit(source, tmp_path, group):
    with pytest.raises(ApexError, match=r"group size .* use one of 8, 16, 32, 64"):
        quantize(source, tmp_path / "apex", group_size=group)
    assert not (tmp_path / "apex").exists()


def test_intermediate_96_names_a_group_size_that_fits(tmp_path):
    folder = save_model(tmp_path / "source", intermediate_size=96)
    with pytest.raises(
        ApexError,
        match=r"64 does not divide down \(96 inputs\) of model.layers.0.mlp.experts: use one of 8, 16, 32",
    ):
        quantize(folder, tmp_path / "apex")
    quantize(folder, tmp_path / "apex", group_size=32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_weights_are_named(tmp_path, value):
    model = make_model("mixtral", torch.bfloat16)
    model.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = value
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(
        ApexError, match=r"model.layers.1.mlp.experts, expert 3: the down matrix has a NaN or an infinite"
    ):
        quantize(tmp_path / "source", tmp_path / "apex")
    names = set(contents(tmp_path / "apex"))
    assert MANIFEST not in names and not [name for name in names if "layer-001" in name]


@pytest.mark.parametrize("where", ["/proc/nothing", "/dev/null/x"])
def test_places_that_cannot_be_written(source, where):
    with pytest.raises(ApexError, match=f"writing to {where} failed"):
        quantize(source, Path(where))


def test_too_little_disk_is_said_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 10_000}))
    with pytest.raises(ApexError, match=r"needs [\d,]+ more bytes, and its disk has 10,000 free"):
        quantize(source, tmp_path / "apex")
    assert not (tmp_path / "apex").exists()


def test_a_disk_that_fills_up_leaves_nothing_half_written(source, finished, tmp_path):
    """The kernel's own limit on a file's size stands for the full disk: writes end with an error in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        with pytest.raises(ApexError, match="goes on where it stopped"):
            quantize(source, tmp_path / "apex")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "apex").exists()
    quantize(source, tmp_path / "apex")
    assert contents(tmp_path / "apex") == contents(finished)


@pytest.mark.parametrize("options", [{"high": "int4"}, {"low_method": "magic"}, {"low_down": 5}])
def test_unknown_formats(source, tmp_path, options):
    with pytest.raises(ApexError):
        quantize(source, tmp_path / "apex", **options)
