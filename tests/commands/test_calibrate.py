import json
import sys
from shutil import copytree

import numpy as np
import pytest
import torch
from conftest import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

import apex_engine
from apex_engine.calibrate import main, parser
from apex_engine.calibration.measure import calibrate, record
from apex_engine.calibration.recorder import Recorder
from apex_engine.calibration.rows import sample
from apex_engine.calibration.search import Limit
from apex_engine.calibration.settings import Settings
from apex_engine.checkpoint.calibration import CALIBRATION, read_calibration
from apex_engine.checkpoint.manifest import Manifest, Twin
from apex_engine.checkpoint.moments import MOMENTS, Moments, accumulate, block_size, write_moments
from apex_engine.core.scorer import wanted
from apex_engine.errors import ApexError
from apex_engine.eval.perplexity import judge, window_logits
from apex_engine.eval.texts import domains, windows
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat
from apex_engine.quantize.convert import convert
from apex_engine.quantize.ladder import make_twins
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from models import save_model

SMALL = Settings(tokens=2560, length=32, batch_size=16, memory="100%")


@pytest.fixture(scope="module")
def calibrated(bundled_apex, tmp_path_factory):
    """The bundled model's clip twins, calibrated, and what was written."""
    folder = tmp_path_factory.mktemp("calibrated") / "apex"
    copytree(bundled_apex, folder)
    return folder, calibrate(folder, Limit("kl", 0.05), SMALL)


def test_the_limit_holds_on_other_text(calibrated, bundled):
    """Calibrated on what the model writes; here on the text it was not trained on."""
    folder, content = calibrated
    assert content["measured"]["kl"] <= 0.05
    rows = windows(AutoTokenizer.from_pretrained(bundled), domains(bundled)["kjv"], 4, 128)
    model = apex_engine.load(folder, dtype=torch.float32, mode="deterministic", prefetch=0)
    assert "KL <= 0.05" in model.apex.stats()["thresholds"]["origin"]
    truth = window_logits(AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32), rows)
    found = judge(rows, truth, window_logits(model, rows))
    assert 0.005 < found.kl.mean() < 0.08
    assert model.apex.stats()["share_of_calls"]["low"] > 0.3


def test_the_curve_rises_and_its_points_say_what_they_save(calibrated):
    _, content = calibrated
    kl = [point["kl"] for point in content["curve"]]
    assert kl == sorted(kl) and kl[0] < 0.03 < 0.1 < kl[-1]
    saved = [1 - point["share_low"] * 69632 / 442368 for point in content["curve"]]
    assert saved[0] > saved[-1]
    assert content["measured"] in content["curve"]


def test_later_runs_use_it_and_apex_takes_the_quantiles(calibrated):
    folder, content = calibrated
    manifest = Manifest.read(folder)
    assert read_calibration(folder, manifest)["data"].startswith("text the model wrote")
    model = apex_engine.load(folder, system="apex")
    assert model.apex.thresholds.t1 == (content["quantiles"][0],) * 8
    assert model.apex.thresholds.t2 == (content["quantiles"][1],) * 8
    model.apex.close()


def test_better_twins_come_of_it(calibrated, bundled, tmp_path):
    """gptq with these moments beats clip on text neither was made with, at equal bytes; without moments it is refused."""
    folder, _ = calibrated
    moments = Moments(folder)
    options = Options(low_method="gptq", importance=moments.identity)
    manifest, _ = convert("tiny", Source(bundled), tmp_path / "gptq", options, lambda n: None, moments)
    assert manifest.layout(1) == Manifest.read(folder).layout(1) and manifest.options["importance"] == moments.identity
    rows = windows(AutoTokenizer.from_pretrained(bundled), domains(bundled)["drama"], 4, 64)
    truth = window_logits(AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32), rows)
    kl = []
    for twins in (folder, tmp_path / "gptq"):
        model = apex_engine.load(twins, dtype=torch.float32, mode="deterministic", t1=-1.0, t2=1.0)
        kl.append(judge(rows, truth, window_logits(model, rows)).kl.mean().item())
    assert kl[1] < 0.75 * kl[0]
    with pytest.raises(ApexError, match="needs --importance"):
        make_twins(Options(low_method="gptq"), Source(bundled))
    with pytest.raises(ApexError, match="no use for"):
        make_twins(Options(low_method="hqq", importance="x"), Source(bundled))


def test_moments_of_another_model_are_refused(calibrated, tmp_path):
    moments = Moments(calibrated[0])
    other = save_model(tmp_path / "other", "mixtral")
    with pytest.raises(ApexError, match="another model"):
        convert("x", Source(other), tmp_path / "out", Options(importance=moments.identity), lambda n: None, moments)


def test_experts_nobody_chose_fall_back_and_are_counted(tiny, tmp_path):
    source, _ = tiny("mixtral")
    folder = tmp_path / "apex"
    manifest = quantize(source, folder)
    model = apex_engine.load(folder, mode="deterministic", prefetch=0)
    record_into(model, folder, torch.randint(2, 128, (1, 40)))
    moments = Moments(folder)
    options = Options(low_method="gptq", importance=moments.identity)
    made, _ = convert("x", Source(source), tmp_path / "gptq", options, lambda n: None, moments)
    total = 2 * manifest.experts * len(manifest.layers)
    assert 0 < sum(made.fallbacks.values()) <= total and "unweighted" in made.fallbacks
    assert Manifest.read(tmp_path / "gptq").fallbacks == made.fallbacks


def record_into(model, folder, rows):
    recorder = record(model, folder, rows, Settings(batch_size=8), lambda n: None)
    write_moments(folder, Manifest.read(folder).fingerprint, recorder.tensors())
    return recorder


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_what_is_recorded_is_what_the_model_computes(tiny, tmp_path, family):
    """Moments, scores and errors of every layer against the same by hand, from the original model's own modules."""
    source, apex = tiny(family)
    rows = torch.randint(2, 128, (3, 20))
    model = apex_engine.load(apex, dtype=torch.float32, mode="deterministic", prefetch=0)
    recorder = record(model, apex, rows, Settings(batch_size=2), lambda n: None)
    manifest = Manifest.read(apex)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen = []
    modules = dict(original.named_modules())
    for entry in manifest.layers:
        modules[entry.module if entry.module in modules else f"model.{entry.module}"].register_forward_hook(
            lambda _, args, out: seen.append((*args, out))
        )
    original(input_ids=rows, use_cache=False)
    profile = recorder.profile()
    for layer, (x, chosen, gates, _) in enumerate(seen):
        choices = chosen.shape[1]
        assert profile.calls[layer].sum() == pytest.approx(choices)
        assert profile.mass[layer].sum() == pytest.approx(1)
        for t1, t2 in ((0.3, 0.8), (0.0, 0.5)):
            want = wanted(gates.detach().float().numpy(), (t1, t2))
            bins = np.arange(101)
            assert profile.calls[layer][bins > round(t2 * 100)].sum() == pytest.approx((want == 0).sum() / len(x))
        for expert in range(manifest.experts):
            tokens, choice = (chosen == expert).nonzero(as_tuple=True)
            assert recorder.tokens[layer, expert] == len(tokens)
            g = gates[tokens, choice].float()
            expected = (x[tokens] * g[:, None]).T @ (x[tokens] * g[:, None])
            blocks = recorder.moments[layer]["up"][expert]
            torch.testing.assert_close(
                torch.block_diag(*blocks), expected, rtol=1e-3, atol=1e-3 * expected.max().item()
            )


def test_blocks_of_the_moments():
    x, g = torch.randn(50, 24), torch.rand(50)
    whole = (x * g[:, None]).T @ (x * g[:, None])
    for size in (24, 8, 1):
        sums = torch.zeros(24 // size, size, size)
        accumulate(sums, x[:20], g[:20])
        accumulate(sums, x[20:], g[20:])
        for i, block in enumerate(sums):
            part = slice(i * size, (i + 1) * size)
            torch.testing.assert_close(block, whole[part, part])
    widths = (4096, 14336, 768, 1408, 2880, 6400, 192)
    assert [block_size(k, 512, 64) for k in widths] == [512, 512, 384, 128, 320, 320, 192]
    assert block_size(4096, 1, 64) == block_size(4096, 63, 64) == 1


def test_a_model_writes_the_same_text_for_the_same_seed(bundled_apex):
    model = apex_engine.load(bundled_apex, mode="exact", memory="100%", prefetch=0)
    seen = []
    first = sample(model, 3, 12, 1, seen.append)
    assert first.shape == (3, 12) and seen == [1] * 11
    assert torch.equal(first, sample(model, 3, 12, 1, seen.append))
    assert not torch.equal(first, sample(model, 3, 12, 2, seen.append))
    assert (first[:, 0] == model.config.eos_token_id).all() or (first[:, 0] == model.config.bos_token_id).all()


def test_the_command(bundled, bundled_apex, tmp_path, capsys):
    folder, text = tmp_path / "apex", tmp_path / "a.txt"
    copytree(bundled_apex, folder)
    text.write_text((bundled / "text" / "kjv.txt").read_text()[:12000])
    given = {"--data": text, "--max-drop": "2%", "--tokens": 256, "--length": 32, "--plot": tmp_path / "c.svg"}
    main([str(folder), *(str(part) for pair in given.items() for part in pair)])
    out, err = capsys.readouterr()
    assert out.startswith("perplexity +2.00%: measured KL") and "trade-off, measured" in err
    content = json.loads((folder / CALIBRATION).read_text())
    assert content["measured"]["change"] <= 0.02 and content["tokens"] == 256 and "sha256" in content["data"]
    assert (folder / MOMENTS).is_file() and "<svg" in (tmp_path / "c.svg").read_text()


def test_its_help_names_the_files_that_it_writes():
    """Written twice, since the modules that write them need torch."""
    shown = parser().format_help()
    assert CALIBRATION in shown and MOMENTS in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-kl", "0"], "above 0"),
        (["--max-drop", "much"], "0.5%"),
        (["--max-drop", "0.5"], "0.5%"),
        (["--length", "1"], "at least 2"),
        (["--plot", "x.foo"], ".svg"),
        (["--tokens", "100"], "two windows"),
        (["--batch-size", "0"], "at least 1"),
        (["--data", "nowhere.txt"], "neither a file"),
        (["--device", "tpu"], "unknown device"),
        (["--seed", "-1"], "out of range"),
        (["--plot", "/etc/passwd/x.svg"], "/etc/passwd is no directory"),
    ],
)
def test_mistakes_are_named(bundled_apex, arguments, message):
    with pytest.raises(ApexError, match=message):
        main([str(bundled_apex), *arguments])


def test_a_dataset_without_its_library_is_one_line(command, bundled_apex, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    code, out, err = command(main, bundled_apex, "--data", "owner/name")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert "pip install 'apex-engine[eval]'" in err


def test_moments_that_do_not_fit_are_refused_before_anything_is_loaded(bundled_apex, monkeypatch):
    monkeypatch.setattr("apex_engine.calibration.room.free_memory", lambda device: 1 << 20)
    with pytest.raises(ApexError, match="smaller --block"):
        main([str(bundled_apex)])


def test_shapes_of_a_large_model():
    """Mixtral 8x7B: the second moments in blocks of 512 are smaller than its experts."""

    low = Layout(ExpertShape(4096, 14336, True), MatrixFormat("int2", 64), MatrixFormat("int2", 64))
    large = Manifest("", "", {}, 8, (Twin("int2", low),), (), 0)
    shapes = Recorder.shapes(large, 512)
    assert shapes == {"up": (8, 8, 512, 512), "down": (8, 28, 512, 512)}
