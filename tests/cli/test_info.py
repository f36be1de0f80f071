"""apex info and apex verify."""

import json
import shutil

import pytest

from apex_engine.checkpoint.calibration import CALIBRATION, CALIBRATION_VERSION, twins_of
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.cli import info, verifying
from apex_engine.errors import ApexError
from apex_engine.quantize import __main__ as quantize_command


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """A copy for the test to spoil."""
    shutil.copytree(tiny()[1], tmp_path / "apex")
    return tmp_path / "apex"


def calibrate(folder, **changes):
    manifest = Manifest.read(folder)
    thresholds = {"t1": [0.5] * len(manifest.layers), "t2": [0.9] * len(manifest.layers)}
    content = {"version": CALIBRATION_VERSION, "twins": twins_of(manifest), "thresholds": thresholds}
    content |= {"quantiles": [0.6, 0.9], "limit": "KL <= 0.01"} | changes
    (folder / CALIBRATION).write_text(json.dumps(content))


def test_info_in_words(checkpoint, capsys):
    info.main([str(checkpoint)])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and out.startswith(
        f"{checkpoint}: source, 2 MoE layers of 6 experts as bfloat16 and int2, "
    )
    said = " ".join(err.split())
    for part in (
        "12 experts in 2 layers",
        "bytes an expert",
        "bits a weight",
        "not calibrated",
        "high 16bit",
        "group_size 64",
    ):
        assert part in said


def test_info_as_json(checkpoint, capsys):
    manifest = Manifest.read(checkpoint)
    info.main([str(checkpoint), "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and found["fingerprint"] == manifest.fingerprint and found["options"] == manifest.options
    assert (found["moe_layers"], found["experts"], found["dense_bytes"]) == (2, 6, manifest.dense_bytes)
    assert found["bytes"] == sum((checkpoint / name).stat().st_size for name in manifest.files)
    low, high = found["twins"]
    assert (low["name"], low["called"], high["name"], high["called"]) == ("int2", "low", "bfloat16", "high")
    assert low["bytes_an_expert"] == manifest.layout(1).stride and low["bytes"] == 12 * low["bytes_an_expert"]
    assert low["matrices"]["down"] == {"format": "int2", "group": 64, **manifest.errors["int2.down"]}
    assert high["bits_a_weight"] == 16.0 and found["calibration"] is None


def test_info_on_calibrations(checkpoint, capsys):
    calibrate(checkpoint)
    info.main([str(checkpoint)])
    assert "calibrated for KL <= 0.01" in capsys.readouterr().err
    calibrate(checkpoint, twins={})
    info.main([str(checkpoint)])
    assert "its calibration is unusable" in capsys.readouterr().err
    info.main([str(checkpoint), "--json"])
    assert "belongs to other twins" in json.loads(capsys.readouterr().out)["calibration"]["unusable"]


@pytest.mark.parametrize("command", [info.main, verifying.main])
def test_neither_takes_anything_else(command, tiny):
    with pytest.raises(ApexError, match="not a finished apex checkpoint"):
        command([str(tiny()[0])])


@pytest.mark.parametrize("command", [verifying.main, lambda arguments: quantize_command.main(["--verify", *arguments])])
def test_verify(command, checkpoint, capsys):
    command([str(checkpoint)])
    out, err = capsys.readouterr()
    count = len(Manifest.read(checkpoint).files)
    assert out == "" and f"{count}/{count}" in err and f"{checkpoint} is as it was written" in err
    path = checkpoint / Manifest.read(checkpoint).layers[1].files[0]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ApexError, match=rf"{path} is not as it was written"):
        command([str(checkpoint)])
    assert "is as it was written" not in capsys.readouterr().err
