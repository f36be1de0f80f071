import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import apex_engine
from apex_engine.eval.perplexity import decoded_logits, score, window_logits
from apex_engine.eval.texts import domains, windows


@pytest.fixture(scope="module")
def setting():
    from apex_engine.quantize.source import ALIASES, Path

    folder = Path(ALIASES["tiny"])
    return (
        folder,
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )


def test_a_model_against_itself(setting):
    folder, tokenizer, model = setting
    rows = windows(tokenizer, domains(folder)["kjv"], 2, 64)
    found = score(model, rows, window_logits(model, rows))
    expected = sum(model(row[None], labels=row[None]).loss.item() for row in rows) / 2
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert found.kl == pytest.approx(0, abs=1e-6) and found.agreement == 1.0


def test_kl_by_hand():
    reference = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    other = torch.tensor([[[0.25, 0.5, 0.25]]]).log()
    found = score(None, torch.tensor([[0, 1]]), reference, lambda *_: other)
    assert found.kl == pytest.approx(0.25 * math.log(2))
    assert found.loss == pytest.approx(math.log(2)) and found.agreement == 0.0


def test_one_by_one_is_the_same_model(setting, bundled_apex):
    folder, tokenizer, _ = setting
    rows = windows(tokenizer, domains(folder)["code"], 2, 32)
    model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="deterministic", memory="25%", kernels="torch")
    torch.testing.assert_close(decoded_logits(model, rows), window_logits(model, rows), rtol=0, atol=1e-4)
    assert model.apex.stats()["sequences"] == 4


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
    assert score(model, rows, window_logits(model, rows)).loss == pytest.approx(loss, abs=0.2)
