import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from apex_engine.checkpoint.manifest import LayerEntry, Manifest, Twin
from apex_engine.config import Config
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat
from apex_engine.memory.plan import kv_bytes, make_plan
from models import FAMILIES

HIGH, LOW = 2, 1


def a_manifest(layers: int, experts: int, inter: int = 512) -> Manifest:
    shape = ExpertShape(256, inter, True)
    high = Layout(shape, MatrixFormat("bfloat16"), MatrixFormat("bfloat16"))
    low = Layout(shape, MatrixFormat("int2", 64), MatrixFormat("int2", 64))
    return Manifest(
        "", "", {}, experts, (Twin("int2", low), Twin("bfloat16", high)), (LayerEntry(0, "", ("", "")),) * layers, 0
    )


@given(
    st.integers(2, 8),
    st.integers(8, 32),
    st.floats(1, 120),
    st.floats(0, 1),
    st.sampled_from(["adaptive", "deterministic", "exact"]),
)
def test_slots_stay_within_the_budget_and_use_it(layers, experts, percent, share, mode):
    manifest = a_manifest(layers, experts)
    config = Config(mode=mode, memory=f"{percent:.3f}%", low_share=share)
    try:
        plan = make_plan(config, manifest)
    except ApexError:
        assert percent < 200 / (layers * experts)
        return
    total = layers * experts
    assert 1 <= plan.slots[HIGH] <= total
    assert plan.slots[LOW] <= total
    assert (plan.slots[LOW] == 0) == (mode == "exact")
    assert plan.slot_bytes <= plan.budget
    left = plan.budget - plan.slot_bytes
    if mode == "exact":
        assert left < plan.stride[HIGH] or plan.slots[HIGH] == total
    else:  # nothing more fits of what is still missing
        assert left < plan.stride[LOW] or plan.slots[LOW] == total
        assert left < plan.stride[HIGH] or plan.slots[HIGH] == total


@pytest.mark.parametrize("percent", [5, 25, 50, 75])
@pytest.mark.parametrize("mode", ["adaptive", "deterministic"])
def test_ninety_percent_of_the_budget_is_used(percent, mode):
    plan = make_plan(Config(mode=mode, memory=f"{percent}%"), a_manifest(8, 8))
    assert plan.slot_bytes >= 0.9 * plan.budget


@pytest.mark.parametrize("mode", ["adaptive", "deterministic", "exact"])
def test_too_small_is_refused_with_the_number_that_works(mode):
    manifest = a_manifest(2, 4)
    with pytest.raises(ApexError, match="give at least") as caught:
        make_plan(Config(mode=mode, memory=1000), manifest)
    least = int(re.search(r"give at least (\d+)", str(caught.value))[1])
    assert make_plan(Config(mode=mode, memory=least), manifest).slots[HIGH] == 1
    with pytest.raises(ApexError):
        make_plan(Config(mode=mode, memory=least - 1), manifest)


def test_a_calibration_gives_low_twins_more_room():
    manifest = a_manifest(4, 64)
    more = make_plan(Config(memory="50%"), manifest, calibrated=True)
    assert more == make_plan(Config(memory="50%", low_share=0.1), manifest) != make_plan(Config(memory="50%"), manifest)


def test_all_low_twins_resident_can_be_asked_for():
    manifest = a_manifest(4, 8)
    plan = make_plan(Config(memory="50%", low_share=1.0), manifest)
    assert plan.slots[LOW] == 32 and plan.slots[HIGH] > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_bytes_are_those_of_a_real_cache(tiny, family):
    model = AutoModelForCausalLM.from_pretrained(tiny(family)[0], dtype=torch.float32)
    cache = model(torch.randint(2, 128, (1, 12)), use_cache=True).past_key_values
    real = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values) if t is not None)
    assert kv_bytes(model.config, 12, 4) == real


def test_kv_bytes_of_a_family_with_recurrent_layers_are_unknown():
    assert (
        kv_bytes(
            AutoConfig.for_model("granitemoehybrid", layer_types=["mamba", "attention"], num_hidden_layers=2), 9, 2
        )
        is None
    )


def test_more_than_everything_is_everything():
    plan = make_plan(Config(memory="1000%"), a_manifest(2, 8))
    assert plan.slots == {HIGH: 16, LOW: 16}


class TestTiers:
    def test_device_memory_counts_dense_weights_and_the_kv_cache_first(self):
        manifest = a_manifest(4, 8)
        plain = make_plan(Config(memory=20 * manifest.strides[HIGH]), manifest)
        total = Config(device_memory=20 * manifest.strides[HIGH] + 1000 + 500)
        assert make_plan(total, manifest, dense_bytes=1000, kv=500).slots == plain.slots

    def test_too_little_device_memory_is_refused_with_the_number_that_works(self):
        manifest = a_manifest(2, 4)
        with pytest.raises(ApexError, match=r"after 10,000,000 for dense weights and the KV cache") as caught:
            make_plan(Config(device_memory=10_000_100), manifest, dense_bytes=9_000_000, kv=1_000_000)
        least = int(re.search(r"give at least (\d+)", str(caught.value))[1])
        assert make_plan(Config(device_memory=least), manifest, 9_000_000, 1_000_000).slots[HIGH] == 1

    def test_floor_holds_every_low_twin(self):
        manifest = a_manifest(4, 8)
        plan = make_plan(Config(memory="60%", low_share="floor"), manifest)
        assert plan.slots[LOW] == 32 and plan.slots[HIGH] >= 1 and plan.slot_bytes <= plan.budget
        assert make_plan(Config(memory="60%", low_share="floor", mode="exact"), manifest).slots[LOW] == 0
        with pytest.raises(ApexError, match="every LOW twin"):
            make_plan(Config(memory=32 * manifest.strides[LOW], low_share="floor"), manifest)

    def test_the_host_tier_takes_the_same_share_of_both_twins(self):
        manifest = a_manifest(4, 8)
        assert make_plan(Config(), manifest).host_slots == {}
        plan = make_plan(Config(host_memory="50%"), manifest)
        assert plan.host_slots == {HIGH: 16, LOW: 16} and not plan.host_holds_all
        plan = make_plan(Config(host_memory="100%"), manifest)
        assert plan.host_holds_all and plan.host_bytes == 32 * (manifest.strides[HIGH] + manifest.strides[LOW])
        assert make_plan(Config(host_memory="100%", mode="exact"), manifest).host_slots == {HIGH: 32}
        with pytest.raises(ApexError, match="too few"):
            make_plan(Config(host_memory=manifest.strides[HIGH]), manifest)
