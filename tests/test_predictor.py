"""The predictor asks a model's own routers: for a layer's own input it must say what the layer then does."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import apex_engine
from apex_engine.experts import ApexExperts
from models import FAMILIES


def watched(model):
    """(layer, router input, weights, choice) of every MoE layer call."""
    calls = []
    for module in model.modules():
        if isinstance(module, ApexExperts):
            module.register_forward_pre_hook(lambda m, args: calls.append((m._layer, *args)))
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_every_router_is_learnt_and_asked_as_the_model_asks_it(tiny, family):
    model = apex_engine.load(tiny(family)[1], dtype=torch.float32, memory="60%", correct_norm=False)
    predictor = model.apex.predictor
    assert not predictor.ready
    model(torch.randint(2, 128, (1, 5)))
    assert predictor.ready and predictor.unknown == []
    calls = watched(model)
    model(torch.randint(2, 128, (1, 7)))
    for layer, x, chosen, weights in calls:
        predicted_weights, predicted = predictor.predict(layer, layer, x)
        assert torch.equal(predicted, chosen) and torch.equal(predicted_weights, weights)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "minimax_m2", "gpt_oss"])
def test_the_norms_weight_is_corrected(tiny, family):
    """An input whose norm has been swapped for the later layer's is predicted as that layer would choose."""
    model = apex_engine.load(tiny(family)[1], dtype=torch.float32, memory="60%")
    predictor, calls = model.apex.predictor, None
    model(torch.randint(2, 128, (1, 5)))
    calls = watched(model)
    model(torch.randint(2, 128, (1, 9)))
    (first, x, *_), second = calls[0], calls[1][0]
    mine, its = predictor._norms[first], predictor._norms[second]
    assert mine is not None and its is not None and not torch.allclose(mine, its)
    expected = predictor.predict(second, second, x * (its / mine))
    found = predictor.predict(first, second, x)
    assert torch.equal(found[1], expected[1])


def test_a_router_of_another_kind_is_not_predicted_and_said_so(tiny, monkeypatch):
    """Its choice cannot be had again: here, because it draws at random."""
    model = apex_engine.load(tiny()[1], dtype=torch.float32, memory="60%")
    router = model.model.layers[1].mlp.gate
    forward = router.forward

    def moody(x):
        logits, weights, chosen = forward(x)
        return logits, weights, (chosen + int(torch.randint(1, 6, ()))) % 6

    monkeypatch.setattr(router, "forward", moody)
    model.generate(torch.randint(2, 128, (1, 5)), max_new_tokens=5)
    assert model.apex.stats()["layers_not_predicted"] == [1]


def test_recorded_router_logits_are_the_real_ones_only(tiny):
    source, apex = tiny()
    model = apex_engine.load(apex, dtype=torch.float32, mode="exact", memory="40%")
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(2, 128, (1, 6))
    for _ in range(2):  # the second with a predictor at work
        found = model(ids, output_router_logits=True).router_logits
        expected = reference(ids, output_router_logits=True).router_logits
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
