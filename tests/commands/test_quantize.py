"""The quantize command as its user meets it."""

import pytest
import torch

from apex_engine.cli import quantizing
from apex_engine.quantize import __main__ as quantize_command
from apex_engine.quantize import blob
from models import make_model, save_model


class TestQuantize:
    def test_table_and_rerun(self, command, bundled, tmp_path):
        code, out, err = command(
            quantize_command.main, bundled, "-o", tmp_path / "apex", "--high", "int8", "--low-down", 3
        )
        assert (code, out) == (0, "")
        for part in (
            "64 experts in 8 layers",
            "int8",
            "int3",
            "relative error",
            "225,280 bytes an expert",
            "8.15 bits a weight",
        ):
            assert part in " ".join(err.split())
        code, _, err = command(
            quantize_command.main, bundled, "-o", tmp_path / "apex", "--high", "int8", "--low-down", 3
        )
        assert code == 0 and "is complete already: nothing to do" in " ".join(err.split())

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("/nowhere/at/all",), "no directory, no hub id"),
            (("tiny", "--group-size", "38"), "use one of 8, 16, 32, 64"),
            (("tiny", "--group-size", "0"), "use one of 8, 16, 32, 64"),
            (("olmoe",), "the hub could not be reached"),
        ],
    )
    def test_mistakes_are_one_line_and_leave_nothing(self, command, tmp_path, monkeypatch, args, message):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        code, out, err = command(quantize_command.main, *args, "-o", tmp_path / "apex")
        assert (code, out) == (2, "") and not (tmp_path / "apex").exists()
        (line,) = err.strip().splitlines()
        assert line.startswith("error: ") and message in line

    def test_nan_in_a_weight(self, command, tmp_path):
        model = make_model("mixtral", torch.bfloat16)
        model.model.layers[0].mlp.experts.gate_up_proj.data[0, 0, 0] = float("nan")
        model.save_pretrained(tmp_path / "source")
        code, _, err = command(quantize_command.main, tmp_path / "source", "-o", tmp_path / "apex")
        assert code == 2 and "model.layers.0.mlp.experts, expert 0: the up matrix has a NaN" in err
        assert "Traceback" not in err

    def test_ctrl_c_leaves_a_run_that_goes_on(self, command, tmp_path, monkeypatch):
        source = save_model(tmp_path / "source")
        encode, left = blob.encode, [40]

        def interrupted(*args):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return encode(*args)

        monkeypatch.setattr(blob, "encode", interrupted)
        code, _, err = command(quantize_command.main, source, "-o", tmp_path / "apex")
        assert code == 130 and "run the same command again" in err and "Traceback" not in err
        assert not list((tmp_path / "apex").rglob("*.part"))
        monkeypatch.undo()
        quantizing.quantize(str(source), tmp_path / "apex", quantize_command.Options())
