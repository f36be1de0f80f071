"""lm-eval's model class around the engine: an answer depends on its request alone."""

import threading

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

import apex_engine
from apex_engine.errors import ApexError
from apex_engine.eval.lm import EngineLM
from apex_engine.runtime.batch import Together
from apex_engine.runtime.experts import ApexExperts


def test_one_token_to_judge(bundled_apex, bundled):
    """Nothing is left to decode after the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="adaptive", t1=1.0, t2=1.0, prefetch=0)
    answers = [
        EngineLM(model, adaptive, tokenizer=tokenizer).answer((None, [5, 6, 7], [8])) for adaptive in (True, False)
    ]
    assert answers[0][0] == pytest.approx(answers[1][0], rel=1e-4) and answers[0][0] < 0


@pytest.fixture(scope="module")
def requests(bundled):
    def likelihood(context, continuation):
        return Instance("loglikelihood", {}, (context, continuation), 0)

    text = (bundled / "text" / "kjv.txt").read_text()
    return [likelihood(text[i : i + 60], text[i + 60 : i + 90]) for i in (0, 400, 800, 1200)]


def test_one_by_one_all_high_is_what_lm_eval_answers(bundled_apex, bundled, requests):
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="adaptive", t1=1.0, t2=1.0, prefetch=0)
    expected = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4).loglikelihood(requests)
    found = EngineLM(model, True, tokenizer=tokenizer).loglikelihood(requests)
    assert [a for a, _ in found] == pytest.approx([a for a, _ in expected], rel=1e-4)
    assert [b for _, b in found] == [b for _, b in expected]


def test_one_by_one_does_not_depend_on_the_order(bundled_apex, bundled, requests):
    """Which a lossy cache would, if a request found what the one before left behind."""
    model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="adaptive", memory="20%", prefetch=0)
    lm = EngineLM(model, True, tokenizer=AutoTokenizer.from_pretrained(bundled))
    found, backwards = lm.loglikelihood(requests), lm.loglikelihood(requests[::-1])[::-1]
    assert found == backwards
    assert model.apex.stats()["calls"]["low"] > 0


@pytest.mark.parametrize("mode", ["deterministic", "exact"])
def test_answers_have_the_same_bits_in_any_batch(bundled_apex, bundled, requests, mode):
    """Although each batch loads an expert once for all of its requests."""
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    found, loads = {}, {}
    for size in (1, 3, 4):
        model = apex_engine.load(bundled_apex, dtype=torch.float32, mode=mode, memory="15%", low_share=0.3, prefetch=0)
        lm = EngineLM(model, batch_size=size, tokenizer=tokenizer)
        likelihoods = lm.loglikelihood(requests)
        texts = lm.generate_until(
            [Instance("generate_until", {}, (r.args[0], {"until": ["\n"], "max_gen_toks": 5}), 0) for r in requests]
        )
        found[size], loads[size] = (likelihoods, texts), sum(model.apex.stats()["loads"].values())
        experts = [module for module in model.modules() if isinstance(module, ApexExperts)]
        assert experts and all(module.engine is model.apex for module in experts)
    assert found[1] == found[3] == found[4]
    assert loads[4] < 0.7 * loads[1]


def test_a_request_that_fails_ends_the_others(bundled_apex):
    model = apex_engine.load(bundled_apex, mode="exact", prefetch=0)
    together, before = Together(model), threading.active_count()

    def good():
        return model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits

    def bad():
        raise ApexError("no")

    with pytest.raises(ApexError, match="no"):
        together.run([good, bad, good])
    with pytest.raises(IndexError):
        together.run([good, lambda: model(input_ids=torch.tensor([[10**6]]), use_cache=False)])
    assert threading.active_count() == before
    first, second = together.run([good, good])
    assert torch.equal(first, second) and torch.equal(first, good())
