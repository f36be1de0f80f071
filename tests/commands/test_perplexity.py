import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import apex_engine
from apex_engine.core.ledger import Ledger
from apex_engine.errors import ApexError
from apex_engine.eval.pair import Pair
from apex_engine.eval.perplexity import Comparison, decoded_logits, judge, stderr, window_logits
from apex_engine.eval.texts import domains, read_text, strided, windows
from apex_engine.perplexity import main
from apex_engine.quantize.source.names import ALIASES


@pytest.fixture(scope="module")
def setting():
    folder = Path(ALIASES["tiny"])
    return (
        folder,
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )


def test_a_model_against_itself(setting):
    folder, tokenizer, model = setting
    rows = windows(tokenizer, domains(folder)["kjv"], 4, 64)
    truth = window_logits(model, rows)
    found = Comparison.joined([judge(rows[:3], truth[:3], truth[:3]), judge(rows[3:], truth[3:], truth[3:])])
    assert found.tokens == 4 * 63
    expected = [model(row[None], labels=row[None]).loss.item() for row in rows]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(expected) / 4), rel=1e-4)
    assert (
        found.change == 0 and found.change_stderr == 0 and found.kl.abs().max() < 1e-6 and found.agreement.min() == 1.0
    )


def test_kl_by_hand():
    reference = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    other = torch.tensor([[[0.25, 0.5, 0.25]]]).log()
    found = judge(torch.tensor([[0, 1]]), reference, other)
    assert found.kl.item() == pytest.approx(0.25 * math.log(2))
    assert found.loss.item() == pytest.approx(math.log(2)) and found.agreement.item() == 0.0
    assert found.reference_perplexity == pytest.approx(4) and found.change == pytest.approx(-0.5)
    assert found.change_stderr is None  # of a single window


def test_errors_are_those_of_the_difference():
    """A loss that every window shares says nothing of how sure the difference is."""
    ones, spread = torch.ones(4, dtype=torch.float64), torch.tensor([1.0, 5.0, 2.0, 9.0], dtype=torch.float64)
    assert Comparison(4, spread, spread + 0.5, ones, ones).change_stderr == pytest.approx(0)
    assert stderr(spread) == pytest.approx(spread.std().item() / 2)


def test_only_the_last_predictions_of_overlapping_windows_count(setting):
    """With a stride, each token is predicted once: the windows are only its context."""
    _, _, model = setting
    ids = torch.arange(100, 140)
    rows = strided(ids, 16, 8)
    assert rows.shape == (4, 16) and rows[1, 0] == ids[8]
    truth = window_logits(model, rows)
    found = judge(rows, truth, truth, last=8)
    expected = -truth[:, -8:].gather(-1, rows[:, -8:, None]).mean((1, 2))
    assert found.tokens == 32 and found.loss.tolist() == pytest.approx(expected.tolist())
    with pytest.raises(ApexError, match="fewer than one window"):
        strided(ids, 41, 8)


def test_texts_that_cannot_be_had_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abc")
    assert read_text(str(tmp_path / "a.txt")) == "abc"
    with pytest.raises(ApexError, match="neither a file nor"):
        read_text(str(tmp_path / "b.txt"))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: {"text": ["one", "two"]})
    assert read_text("owner/name:config:train") == "one\ntwo"

    def offline(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ApexError, match="no route"):
        read_text("owner/name")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(ApexError, match=r"pip install 'apex-engine\[eval\]'"):
        read_text("owner/name")


def test_one_by_one_is_the_same_model(setting, bundled_apex):
    folder, tokenizer, _ = setting
    rows = windows(tokenizer, domains(folder)["code"], 2, 12)
    model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="deterministic", memory="25%", kernels="torch")
    torch.testing.assert_close(decoded_logits(model, rows), window_logits(model, rows), rtol=0, atol=1e-4)
    torch.testing.assert_close(decoded_logits(model, rows, prompt=5), window_logits(model, rows), rtol=0, atol=1e-4)
    assert model.apex.stats()["sequences"] == 2 + 1 + 2 + 1


def test_the_ledger_counts_the_mode_that_is_judged_and_not_its_reference(setting, bundled_apex):
    folder, tokenizer, reference = setting
    rows = windows(tokenizer, domains(folder)["kjv"], 2, 32)
    model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="deterministic", memory="50%", prefetch=0)
    words = model.apex.manifest.words
    ledgers = {"deterministic": Ledger(words), "adaptive": Ledger(words)}
    own = Pair(model).compare(rows, ledgers)
    counted = {mode: ledger.summary() for mode, ledger in ledgers.items()}
    assert counted["deterministic"]["share_of_calls"]["low"] > 0.2 and counted["adaptive"]["tokens"]["decode"] == 2 * 30
    assert counted["deterministic"]["tokens"]["prefill"] == 2 * 31
    # Each window from an empty cache: with another reference the engine does the same, and finds the same resident.
    again = {mode: Ledger(words) for mode in ledgers}
    other = Pair(model, reference).compare(rows, again)
    for mode in ledgers:
        assert again[mode].summary()["bytes_read"] == counted[mode]["bytes_read"]
        assert other[mode].kl.tolist() == pytest.approx(own[mode].kl.tolist(), abs=1e-4)


def test_the_command(bundled_apex, tmp_path, capsys):
    names = [tmp_path / folder / "x.txt" for folder in ("a", "b")]
    for name in names:
        name.parent.mkdir()
        name.write_text("And it came to pass, that the king said unto them. " * 20)
    short = [str(bundled_apex), "--length", "32", "--tokens", "64", "--text"]
    main([*short, *map(str, names), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found["texts"]) == [*map(str, names)] and all(0 < row["kl"] < 0.2 for row in found["texts"].values())
    main([*short, str(names[0]), "--mode", "exact", "--stride", "16"])
    out, err = capsys.readouterr()
    assert "(+0.00%), KL 0.0000" in out.replace("-", "+") and "exact against exact" in err
    main([*short, str(names[0]), "--system", "on-demand"])  # a preset in exact mode
    assert "exact against exact" in capsys.readouterr().err
    for wrong, message in (
        ([*map(str, names), "--stride", "33"], "--stride from 1"),
        ([str(tmp_path / "x")], "neither a file"),
    ):
        with pytest.raises(ApexError, match=message):
            main([*short, *wrong])


def test_windows_cover_the_text_and_do_not_overlap(setting):
    folder, tokenizer, _ = setting
    text = domains(folder)["drama"]
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    rows = windows(tokenizer, text, 5, 100)
    starts = [next(i for i in range(len(ids)) if torch.equal(ids[i : i + 100], row)) for row in rows]
    assert starts[0] == 0 and starts[-1] > 0.7 * len(ids) and min(b - a for a, b in itertools.pairwise(starts)) >= 100
    with pytest.raises(ValueError, match="windows of 1000"):
        windows(tokenizer, text, 1000, 1000)


@pytest.mark.parametrize(("domain", "loss"), [("kjv", 3.18), ("drama", 3.62), ("code", 2.86)])
def test_the_model_cards_losses(setting, domain, loss):
    """Published over 32 windows of 256 tokens; here over 12 of them, so only the neighbourhood can be right."""
    folder, tokenizer, model = setting
    rows = windows(tokenizer, domains(folder)[domain], 12, 256)
    truth = window_logits(model, rows)
    assert judge(rows, truth, truth).loss.mean().item() == pytest.approx(loss, abs=0.2)
