"""The predictor asks a model's own routers: for a layer's own input it must say what the layer then does."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import apex_engine
from apex_engine.predict.base import EMBEDDING
from apex_engine.runtime.experts import ApexExperts
from models import FAMILIES


def watched(model):
    """(layer, router input, weights, choice) of every MoE layer call."""
    calls = []
    for module in model.modules():
        if isinstance(module, ApexExperts):
            module.register_forward_pre_hook(lambda m, args: calls.append((m.layer, *args)))
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_every_router_is_learnt_and_asked_as_the_model_asks_it(tiny, family):
    model = apex_engine.load(tiny(family)[1], dtype=torch.float32, memory="60%", predictor="gate")
    predictor = model.apex.predictor
    assert not predictor.ready
    model(torch.randint(2, 128, (1, 5)))
    assert predictor.ready and predictor.unknown == []
    calls = watched(model)
    model(torch.randint(2, 128, (1, 7)))
    for layer, x, chosen, weights in calls:
        predicted_weights, predicted = predictor.predict(layer, layer, x)
        assert (predicted == chosen.numpy()).all() and (predicted_weights == weights.float().numpy()).all()
        for t in range(len(x)):  # of one token, in any order, and the weights up to a factor
            one_weights, one = (part[0] for part in predictor.predict(layer, layer, x[t : t + 1]))
            order, expected = np.argsort(one), chosen[t].argsort()
            assert one[order].tolist() == chosen[t][expected].tolist()
            shares, real = one_weights[order] / one_weights.sum(), weights[t][expected] / weights[t].sum()
            np.testing.assert_allclose(shares, real.float().numpy(), rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "minimax_m2", "gpt_oss"])
def test_the_norms_weight_is_corrected(tiny, family):
    """An input whose norm has been swapped for the later layer's is predicted as that layer would choose."""
    model = apex_engine.load(tiny(family)[1], dtype=torch.float32, memory="60%", predictor="norm")
    predictor, calls = model.apex.predictor, None
    model(torch.randint(2, 128, (1, 5)))
    calls = watched(model)
    model(torch.randint(2, 128, (1, 9)))
    (first, x, *_), second = calls[0], calls[1][0]
    mine, its = predictor.routers.norms[first], predictor.routers.norms[second]
    assert mine is not None and its is not None and not torch.allclose(mine, its)
    expected = predictor.predict(second, second, x * (its / mine))
    found = predictor.predict(first, second, x)
    assert (found[1] == expected[1]).all()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_what_a_layer_does_with_the_input_of_another(tiny, family, dtype):
    """Here: an input that is the layer's own, turned about."""
    model = apex_engine.load(tiny(family)[1], dtype=dtype, memory="60%")
    model(torch.randint(2, 128, (1, 5)))
    predictor, later = model.apex.predictor, len(model.apex.manifest.layers) - 1
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(64, 64))[0].to(dtype)

    def right(tokens):
        """Share of the choices that were foreseen; it learns meanwhile."""
        hits = []
        for x in torch.randn(tokens, 1, 64).to(dtype):
            chosen = predictor.routers.known[later].route(x)[1][0].tolist()
            _, predicted = predictor.predict(0, later, x @ turn)
            hits.append(len(set(predicted[0].tolist()) & set(chosen)) / len(chosen))
            predictor.observe(later, x)
            predictor.learn()
        return np.mean(hits)

    before, _, after = right(60), right(900), right(60)
    assert before < 0.75 and after > 0.9, (before, after)


class Instant:
    """A layer's time that leaves a budget on any machine."""

    free, stall = 1.0, 0.0

    def begin(self):
        pass

    def step(self, now):
        pass


def decoded(apex, kind):
    """The model after 99 decoded tokens, all of which looked ahead."""
    model = apex_engine.load(apex, dtype=torch.float32, memory="30%", link="20MB/s", predictor=kind)
    model.apex.prefetcher.trial.begin = lambda demanded: None  # it goes on whatever it costs
    model.apex.prefetcher.pace = Instant()
    model.generate(torch.randint(2, 128, (1, 5)), max_new_tokens=100, min_new_tokens=100)
    return model


@pytest.mark.parametrize("kind", ["gate", "norm"])
def test_other_predictors_do_not_learn_and_ask_nothing_of_embeddings(tiny, kind):
    model = decoded(tiny()[1], kind)
    predictor = model.apex.predictor
    (question,) = predictor.asked_about(1).values()
    mine, its = (layer.post_attention_layernorm.weight.numpy() for layer in model.model.layers)
    router = model.model.layers[1].mlp.gate.weight.numpy()
    scale = its / mine if kind == "norm" else 1
    np.testing.assert_allclose(question.weight, router * scale, rtol=1e-4)
    assert not predictor.asked_about(0) and model.apex.ledger.predicted == 99


def test_the_first_layer_is_foreseen_from_the_embedding(tiny):
    model = decoded(tiny()[1], "learned")
    predictor = model.apex.predictor
    assert set(predictor.asked_about(0)) == {EMBEDDING} and set(predictor.asked_about(1)) == {0}
    assert model.apex.ledger.predicted == 2 * 99


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
