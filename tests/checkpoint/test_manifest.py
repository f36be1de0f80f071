"""Finished checkpoints: read, verified, spoiled, and written by version 1."""

import json
import shutil

import pytest

from apex_engine.checkpoint.manifest import MANIFEST, Manifest, verify
from apex_engine.errors import ApexError


@pytest.fixture(scope="module")
def source(tiny):
    return tiny(num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def finished(tiny):
    return tiny(num_hidden_layers=3)[1]


def test_verify(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "apex")
    read = []
    verify(tmp_path / "apex", read.append)
    assert set(read) == set(Manifest.read(finished).files)
    content = bytearray((tmp_path / "apex" / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (tmp_path / "apex" / "model.safetensors").write_bytes(content)
    with pytest.raises(ApexError, match=r"model.safetensors is not as it was written"):
        verify(tmp_path / "apex", read.append)


def test_a_card_may_be_edited(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "apex")
    (tmp_path / "apex" / "README.md").write_text("mine")
    assert Manifest.read(tmp_path / "apex").experts == 6


def test_manifest_of_an_unfinished_or_spoiled_checkpoint(finished, tmp_path):
    with pytest.raises(ApexError, match="not a finished apex checkpoint"):
        Manifest.read(tmp_path)
    whole = json.loads((finished / MANIFEST).read_text())
    for damage in ({"version": 2}, {**whole, "files": []}, {**whole, "experts": "6"}, [], {**whole, "twins": {}}):
        (tmp_path / MANIFEST).write_text(json.dumps(damage))
        with pytest.raises(ApexError, match="is damaged"):
            Manifest.read(tmp_path)
    (tmp_path / MANIFEST).write_text((finished / MANIFEST).read_text().replace('"version": 2', '"version": 99', 1))
    with pytest.raises(ApexError, match="format version 99"):
        Manifest.read(tmp_path)
    (tmp_path / MANIFEST).write_text((finished / MANIFEST).read_text())
    with pytest.raises(ApexError, match="is missing"):
        Manifest.read(tmp_path)
