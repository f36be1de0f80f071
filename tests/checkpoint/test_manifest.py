"""Finished checkpoints: read, verified, spoiled, and written by version 1."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import quantize
from folders import contents

from apex_engine.checkpoint.manifest import MANIFEST, Manifest, verify
from apex_engine.errors import ApexError
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source


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


def as_version_1_wrote_it(folder: Path) -> None:
    """Rewrite the manifest: two twins called high and low, errors by those names, options without `low`."""
    content = json.loads((folder / MANIFEST).read_text())
    low, high = content.pop("twins")
    errors = {
        f"{word}.{m}": content["errors"][f"{twin['name']}.{m}"]
        for word, twin in (("high", high), ("low", low))
        for m in ("up", "down")
    }
    layers = [
        {"number": e["number"], "module": e["module"], "low": e["files"][0], "high": e["files"][1]}
        for e in content["layers"]
    ]
    content |= {"version": 1, "low": low["layout"], "high": high["layout"], "errors": errors, "layers": layers}
    assert "low" not in content["options"]
    (folder / MANIFEST).write_text(json.dumps(content, indent=1))


@pytest.mark.parametrize("options", [{}, {"high": "int8", "low_down": 3}])
def test_a_checkpoint_of_version_1_is_as_good_as_new(source, tmp_path, options):
    fresh = quantize(source, tmp_path / "apex", **options)
    as_version_1_wrote_it(tmp_path / "apex")
    assert json.loads((tmp_path / "apex" / MANIFEST).read_text())["version"] == 1
    assert Manifest.read(tmp_path / "apex") == fresh
    verify(tmp_path / "apex", lambda name: None)
    before = contents(tmp_path / "apex")
    again, done = convert("x", Source(source), tmp_path / "apex", Options(**options, low="int2"), lambda n: None)
    assert again == fresh and not done and contents(tmp_path / "apex") == before
    with pytest.raises(ApexError, match="low int2 -> int8"):
        quantize(source, tmp_path / "apex", **{**options, "high": "16bit", "low_down": 2, "low": "int8"})
