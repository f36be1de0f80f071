"""The engine against transformers, and its promises: exact, deterministic, within the budget, and a ledger that adds up."""

import gc
import inspect
import itertools
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed
from transformers.utils import logging as transformers_logging

import apex_engine
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.core.events import Computed, PassBegins
from apex_engine.core.scorer import wanted
from apex_engine.core.vocabulary import ExpertId, Words
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import dequantize
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.store import ExpertStore
from apex_engine.runtime.device import Device
from apex_engine.runtime.experts import ApexExperts
from models import FAMILIES, save_model

HIGH, LOW, SKIP = 2, 1, 0
WORDS = Words.of(["int2", "bfloat16"])


def reference_of(source, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)


def budget(apex, high, low=0):
    """Bytes of so many slots."""
    manifest = Manifest.read(apex)
    return high * manifest.strides[HIGH] + low * manifest.strides[LOW]


class Heard:
    """A sink of a test's own."""

    def __init__(self, handlers):
        self.handlers = handlers


def some_ids(batch=2, length=12):
    return torch.randint(2, 128, (batch, length))


def greedy(model, ids, n=8, **kwargs):
    return model.generate(ids, max_new_tokens=n, do_sample=False, **kwargs)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every cache in these tests fills empty slots with NaN: a use of an unfilled slot would show in the logits."""
    made = ExpertCache.__init__
    monkeypatch.setattr(
        ExpertCache, "__init__", lambda self, *args, **options: made(self, *args, **{**options, "poison": True})
    )


class TestExact:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_logits_and_greedy_tokens_are_transformers_at_any_cache_size(self, tiny, family):
        source, apex = tiny(family)
        reference, ids = reference_of(source), some_ids()
        expected, tokens = reference(ids).logits, greedy(reference, ids)
        manifest = Manifest.read(apex)
        total = manifest.experts * len(manifest.layers)
        chosen = FAMILIES[family]["num_experts_per_tok"]
        for slots in sorted({1, chosen, total // 2, total}):
            model = apex_engine.load(apex, dtype=torch.float32, mode="exact", memory=budget(apex, slots))
            assert model.apex.plan.slots[HIGH] == slots
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
            assert torch.equal(greedy(model, ids), tokens)
            model.apex.check_integrity()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sixteen_bit_greedy_and_seeded_sampling(self, bundled, bundled_apex, dtype):
        reference, ids = reference_of(bundled, dtype), torch.randint(2, 4096, (1, 20))
        model = apex_engine.load(bundled_apex, dtype=dtype, mode="exact", memory="25%")
        assert torch.equal(greedy(model, ids, 24), greedy(reference, ids, 24))
        sampled = []
        for each in (model, reference):
            set_seed(7)
            sampled.append(each.generate(ids, max_new_tokens=24, do_sample=True, temperature=0.8, top_k=50))
        assert torch.equal(*sampled)

    def test_bundled_model(self, bundled, bundled_apex):
        reference = reference_of(bundled)
        ids = AutoTokenizer.from_pretrained(bundled)("And God said unto Noah", return_tensors="pt").input_ids
        expected, tokens = reference(ids).logits, greedy(reference, ids, 32)
        for memory in (budget(bundled_apex, 1), "25%", "100%"):
            model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="exact", memory=memory)
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
            assert torch.equal(greedy(model, ids, 32), tokens)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_left_padded_batch_equals_single_runs(self, tiny, family):
        _, apex = tiny(family)
        model = apex_engine.load(apex, dtype=torch.float32, mode="exact", memory=budget(apex, 3))
        prompts = [some_ids(1, n) for n in (4, 9, 7)]
        longest = 9
        ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=1) for p in prompts])
        mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts])
        together = greedy(model, ids, attention_mask=mask)[:, longest:]
        for row, prompt in zip(together, prompts, strict=True):
            alone = greedy(model, prompt, attention_mask=torch.ones_like(prompt))[0, prompt.shape[1] :]
            assert row[: len(alone)].tolist() == alone.tolist()

    def test_auto_class_returns_the_model_with_default_settings(self, tiny):
        _, apex = tiny()
        model = AutoModelForCausalLM.from_pretrained(apex)
        assert model.apex.config == apex_engine.Config()
        assert model.dtype == torch.bfloat16
        assert sum(isinstance(module, ApexExperts) for module in model.modules()) == 2
        assert not [name for name, _ in model.named_parameters() if "experts" in name]
        assert torch.isfinite(model(some_ids()).logits).all()
        assert model.apex.stats()["resident"].keys() == {"bytes", "high", "low"}

    def test_loading_says_nothing_of_the_guard(self, tiny, caplog):
        transformers_logging.set_verbosity_warning()
        try:
            with caplog.at_level("WARNING"):
                AutoModelForCausalLM.from_pretrained(tiny()[1])
        finally:
            transformers_logging.set_verbosity_error()
        assert "experts" not in caplog.text

    def test_no_token_at_all(self, tiny):
        model = apex_engine.load(tiny()[1], memory="100%")
        experts = next(module for module in model.modules() if isinstance(module, ApexExperts))
        out = experts(torch.zeros(0, 64), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
        assert out.shape == (0, 64)

    def test_one_expert_a_token(self, tiny):
        source, apex = tiny(num_experts_per_tok=1)
        ids = some_ids()
        for mode in ("exact", "adaptive", "deterministic"):
            model = apex_engine.load(apex, dtype=torch.float32, mode=mode, memory="60%")
            torch.testing.assert_close(model(ids).logits, reference_of(source)(ids).logits, rtol=0, atol=1e-5)

    def test_int8_twins_are_close(self, tmp_path, bundled):
        quantize(bundled, tmp_path / "apex", high="int8")
        model = apex_engine.load(tmp_path / "apex", dtype=torch.float32, mode="exact", memory="100%")
        ids = torch.randint(2, 4096, (1, 64))
        p, q = reference_of(bundled)(ids).logits.log_softmax(-1), model(ids).logits.log_softmax(-1)
        assert 0 < (p.exp() * (p - q)).sum(-1).mean().item() < 2e-3

    def test_training_is_refused_rather_than_wrong(self, tiny, tmp_path):
        model = apex_engine.load(tiny()[1])
        assert not model(some_ids()).logits.requires_grad
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
        with pytest.raises(ApexError, match="cannot be trained"):
            model(some_ids())
        with torch.no_grad():
            model(some_ids())
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(tmp_path)

    @pytest.mark.parametrize(
        "how", ["beams", "no cache", "embeddings", "chunked prefill", "prompt lookup", "own cache"]
    )
    def test_other_ways_to_generate(self, tiny, how):
        source, apex = tiny("qwen3_moe")
        model = apex_engine.load(apex, dtype=torch.float32, mode="exact", memory="40%")
        ids = some_ids(1, 12)
        ways = {
            "beams": {"num_beams": 3, "num_return_sequences": 2},
            "no cache": {"use_cache": False},
            "chunked prefill": {"prefill_chunk_size": 5},
            "prompt lookup": {"prompt_lookup_num_tokens": 3},
        }
        results = []
        for each in (model, reference_of(source)):
            given = dict(ways.get(how, {}))
            if how == "embeddings":
                results.append(
                    each.generate(inputs_embeds=each.get_input_embeddings()(ids), max_new_tokens=8, do_sample=False)
                )
                continue
            if how == "own cache":
                name = "cache" if "cache" in inspect.signature(each.forward).parameters else "past_key_values"
                given[name] = DynamicCache(config=each.config)
            results.append(greedy(each, ids, **given))
        assert torch.equal(*results)


class TestDeterministic:
    def test_a_prompts_tokens_do_not_depend_on_what_ran_before(self, bundled_apex):
        prompt, other = torch.randint(2, 4096, (1, 16)), torch.randint(2, 4096, (1, 40))
        fresh = apex_engine.load(bundled_apex, dtype=torch.float32, mode="deterministic", memory="25%")
        tokens, logits = greedy(fresh, prompt, 24), fresh(prompt).logits
        used = apex_engine.load(bundled_apex, dtype=torch.float32, mode="deterministic", memory="10%", policy="lru")
        greedy(used, other, 20)
        assert torch.equal(greedy(used, prompt, 24), tokens)
        assert torch.equal(used(prompt).logits, logits)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nor_on_the_batch(self, bundled_apex, dtype):
        model = apex_engine.load(bundled_apex, dtype=dtype, mode="deterministic", memory="25%")
        prompts = torch.randint(2, 4096, (8, 16))
        together = greedy(model, prompts, 12)
        for prompt, tokens in zip(prompts, together, strict=True):
            assert torch.equal(greedy(model, prompt[None], 12)[0], tokens)

    def test_it_is_the_score_and_the_twins_and_nothing_else(self, tiny):
        """Against transformers with the LOW and skipped experts put in place by hand."""
        source, apex = tiny("olmoe")
        model = apex_engine.load(
            apex, dtype=torch.float32, mode="deterministic", t1=0.3, t2=0.6, first_t1=0.4, memory="30%", kernels="torch"
        )
        ids = some_ids(1, 10)
        reference = by_hand(source, apex, 0.3, 0.6, first_t1=0.4)
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=0, atol=1e-5)
        share = model.apex.stats()["share_of_calls"]
        assert min(share.values()) > 0.1

    def test_all_low_can_be_asked_for(self, tiny):
        source, apex = tiny()
        model = apex_engine.load(
            apex, dtype=torch.float32, mode="deterministic", t1=-1.0, t2=1.0, memory="50%", kernels="torch"
        )
        ids = some_ids()
        torch.testing.assert_close(model(ids).logits, by_hand(source, apex, -1.0, 1.0)(ids).logits, rtol=0, atol=1e-5)
        assert model.apex.stats()["share_of_calls"] == {"high": 0.0, "low": 1.0, "skip": 0.0}


def by_hand(source, apex, t1, t2, first_t1=-1.0):
    """transformers' model whose experts compute every (token, expert) pair alone, with the twin its score asks for."""
    model, manifest = reference_of(source), Manifest.read(apex)
    store = ExpertStore(apex, manifest)
    blobs = [module for name, module in model.named_modules() if name.endswith("experts")]
    for index, module in enumerate(blobs):
        low = torch.empty(manifest.experts, manifest.strides[LOW] + 4096, dtype=torch.uint8)
        twins = []
        for e in range(manifest.experts):
            start = -low[e].data_ptr() % 4096
            blob = low[e, start : start + manifest.strides[LOW]]
            store.read(ExpertId(index, e), LOW, blob.numpy())
            twins.append(
                [
                    dequantize(manifest.layout(LOW).views(blob), matrix, manifest.layout(LOW))
                    for matrix in ("up", "down")
                ]
            )

        first = max(t1, first_t1) if index == 0 else t1

        def forward(x, chosen, weights, module=module, twins=twins, first=first):
            out = torch.zeros_like(x)
            for t, (row, gates) in enumerate(zip(chosen, weights, strict=True)):
                wishes = wanted(gates[None].float().numpy(), (first, max(t2, first)))[0]
                for e, gate, wish in zip(row.tolist(), gates, wishes, strict=True):
                    if wish == SKIP:
                        continue
                    up, down = (module.gate_up_proj[e], module.down_proj[e]) if wish == HIGH else twins[e]
                    out[t] += gate * (module._apply_gate(x[t] @ up.T) @ down.T)
            return out

        module.forward = forward
    return torch.no_grad()(model)


class TestAdaptive:
    def test_everything_resident_is_exact(self, tiny):
        """With every HIGH twin resident a wanted LOW is served HIGH: a hit, and nothing is lost."""
        source, apex = tiny()
        model = apex_engine.load(apex, dtype=torch.float32, memory="130%", low_share=0.0)
        assert model.apex.plan.slots[HIGH] == 12
        tier = model.apex.device.tier
        for layer, expert in itertools.product(range(2), range(6)):
            with tier.lock:
                ticket = tier.request(ExpertId(layer, expert), HIGH, layer)
                tier.settle([ticket], busy=False)
            tier.arrived([ticket])
            tier.release([(HIGH, ticket.slot)])
        ids = some_ids(4, 24)
        torch.testing.assert_close(model(ids).logits, reference_of(source)(ids).logits, rtol=0, atol=1e-5)
        assert model.apex.stats()["calls"]["low"] == 0 < model.apex.stats()["asked"]["low"]

    def test_every_budget_answers(self, tiny):
        for family in ("mixtral", "olmoe", "gpt_oss"):
            _, apex = tiny(family)
            manifest = Manifest.read(apex)
            for high, low in [(1, 1), (1, 3), (2, 1), (4, 4), (manifest.experts, 2)]:
                model = apex_engine.load(apex, memory=budget(apex, high, low), low_share=0.01)
                assert torch.isfinite(model(some_ids(2, 30)).logits).all()
                assert torch.isfinite(model(some_ids(1, 1)).logits).all()
                model.apex.check_integrity()

    def test_a_smaller_budget_is_refused_with_the_number(self, tiny):
        _, apex = tiny()
        least = budget(apex, 1, 1)
        with pytest.raises(ApexError, match=f"give at least {least}"):
            apex_engine.load(apex, memory=least - 1)

    @pytest.mark.parametrize("policy", ["lcu", "lru"])
    def test_resident_bytes_never_pass_the_budget_and_use_it(self, bundled_apex, policy):
        model = apex_engine.load(bundled_apex, memory="25%", policy=policy)
        most = []
        heard = Heard({Computed: lambda event: most.append(model.apex.stats()["resident"]["bytes"])})
        with model.apex.watched(heard):
            greedy(model, torch.randint(2, 4096, (1, 32)), 40)
        whole = 64 * Manifest.read(bundled_apex).strides[HIGH]
        assert max(most) <= 0.25 * whole
        assert most[-1] >= 0.9 * 0.25 * whole
        assert model.apex.stats()["resident"]["bytes"] == most[-1]
        buffers = sum(pool.memory.nbytes for pool in model.apex.device.cache.pools.values())
        assert buffers <= 0.25 * whole


class TestSequences:
    def test_a_pass_without_past_begins_a_sequence(self, bundled_apex):
        model = apex_engine.load(bundled_apex)
        resets = []
        ids = torch.randint(2, 4096, (2, 10))
        with model.apex.watched(Heard({PassBegins: lambda event: resets.append(1) if event.new_sequence else None})):
            greedy(model, ids, 5)
            assert len(resets) == 1
            greedy(model, ids, 5, use_cache=True)
            assert len(resets) == 2
            model(ids)
            assert len(resets) == 3
        stats = model.apex.stats()
        assert stats["sequences"] == 3
        assert stats["tokens"] == {"prefill": 2 * 10 * 3, "decode": 2 * 4 * 2}

    def test_contents_stay(self, bundled_apex):
        model = apex_engine.load(bundled_apex, mode="exact", memory="100%")
        ids = torch.randint(2, 4096, (1, 10))
        model(ids)
        loads = model.apex.stats()["loads"]["high"]
        model(ids)
        assert model.apex.stats()["loads"]["high"] == loads > 0


class TestLedger:
    @pytest.mark.parametrize("prefetch", [0, 2])
    @pytest.mark.parametrize("mode", ["adaptive", "deterministic", "exact"])
    def test_it_adds_up_and_agrees_with_an_independent_count(self, bundled_apex, mode, prefetch, monkeypatch):
        model = apex_engine.load(bundled_apex, mode=mode, memory="25%", prefetch=prefetch, t1=0.6, t2=0.9, first_t1=0.6)
        strides = model.apex.manifest.strides
        routed, reads, computed = [], [], Counter()
        for module in model.modules():
            if isinstance(module, ApexExperts):
                module.register_forward_pre_hook(lambda m, args: routed.append((args[1].clone(), args[2].clone())))
        preadv = os.preadv

        def counted(fd, buffers, offset):
            got = preadv(fd, buffers, offset)
            reads.append(got)
            return got

        monkeypatch.setattr("os.preadv", counted)
        compute = Device.compute

        def counted_compute(self, job, precision, served):
            for one, slot in served:
                assert self.cache.pools[precision].owner[slot] == (job.layer, one.expert)
                computed[strides[precision]] += len(one.tokens)
            compute(self, job, precision, served)

        monkeypatch.setattr(Device, "compute", counted_compute)
        greedy(model, torch.randint(2, 4096, (1, 20)), 20)

        stats = model.apex.stats()
        calls = stats["calls"]
        assert calls["total"] == calls["high"] + calls["low"] + calls["skip"] == sum(ids.numel() for ids, _ in routed)
        assert (calls["high"], calls["low"]) == (computed[strides[HIGH]], computed[strides[LOW]])
        with model.apex.device.tier.lock:  # what is on its way is read, and counted when it is there
            model.apex.device.tier.drop_all()
        model.apex.close()
        stats = model.apex.stats()
        assert stats["bytes_read"]["total"] == sum(reads)
        loaded = {p: stats["loads"][WORDS[p]] * strides[p] for p in strides}
        if prefetch:
            early = stats["prefetch"]
            assert sum(loaded.values()) <= stats["bytes_read"]["total"] <= sum(loaded.values()) + early["bytes"]
            assert early["bytes"] == early["useful_bytes"] + early["wasted_bytes"] and early["wasted_bytes"] >= 0
        else:
            assert {p: stats["bytes_read"][WORDS[p]] for p in strides} == loaded and not stats["prefetch"]["bytes"]
        asked = Counter({"high": 0, "low": 0, "skip": 0})
        for _, weights in routed:
            wishes = np.full(weights.shape, HIGH) if mode == "exact" else wanted(weights.float().numpy(), (0.6, 0.9))
            asked.update(WORDS[w] for w in wishes.ravel())
        assert stats["asked"] == asked
        mass = sum(weights.abs().sum().item() for _, weights in routed)
        assert sum(model.apex.ledger.mass) == pytest.approx(mass, rel=1e-4)
        assert sum(stats["share_of_calls"].values()) == pytest.approx(1)
        seconds = stats["seconds"]
        assert seconds["stall"] + seconds["compute"] + seconds["rest"] == pytest.approx(
            seconds["prefill"] + seconds["decode"]
        )
        if mode != "adaptive":
            assert {word: calls[word] for word in asked} == asked

    def test_hits_and_loads_are_the_uses(self, bundled_apex):
        model = apex_engine.load(bundled_apex, mode="exact", memory="50%")
        routed = []
        for module in model.modules():
            if isinstance(module, ApexExperts):
                module.register_forward_pre_hook(lambda m, args: routed.append(len(args[1].unique())))
        greedy(model, torch.randint(2, 4096, (1, 20)), 20)
        stats = model.apex.stats()
        assert stats["hits"]["high"] + stats["loads"]["high"] == sum(routed)

    def test_reset(self, bundled_apex):
        model = apex_engine.load(bundled_apex)
        ids = torch.randint(2, 4096, (1, 10))
        model(ids)
        model.apex.reset_stats()
        assert model.apex.stats()["calls"]["total"] == 0
        model(ids)
        assert model.apex.stats()["calls"]["total"] == 10 * 8 * 2
        assert model.apex.stats()["resident"]["bytes"] > 0


class TestRuntime:
    """What loading at the same time must not change."""

    @pytest.mark.parametrize("host", [0, "40%", "100%"])
    @pytest.mark.parametrize("admission", ["stream", "evict"])
    def test_exact_is_exact_behind_a_link(self, bundled, bundled_apex, host, admission):
        ids = torch.randint(2, 4096, (1, 40))
        tokens = greedy(reference_of(bundled), ids, 12)
        model = apex_engine.load(
            bundled_apex,
            dtype=torch.float32,
            mode="exact",
            memory="20%",
            host_memory=host,
            link="2GB/s,20us",
            admission=admission,
            prefetch=4,
        )
        assert torch.equal(greedy(model, ids, 12), tokens)
        model.apex.close()

    @pytest.mark.parametrize("options", [{}, {"system": "apex"}, {"system": "on-demand"}, {"policy": "lfru"}])
    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_a_long_prompt_with_hardly_any_slots(self, bundled_apex, options, slots):
        memory = budget(bundled_apex, slots, 0 if "on-demand" in options.values() else slots)
        model = apex_engine.load(bundled_apex, memory=memory, **options)
        out = greedy(model, torch.randint(2, 4096, (1, 256)), 4)
        assert out.shape == (1, 260)
        model.apex.check_integrity()

    def test_a_long_prompt_leaves_every_layer_its_slots(self, bundled_apex):
        """But for the few it passes through; evicting like decoding does leaves nearly all to the last layers."""
        moved = {}
        for admission in ("stream", "evict"):
            model = apex_engine.load(
                bundled_apex, mode="exact", memory="25%", prefetch=0, admission=admission, policy="lru"
            )
            greedy(model, torch.randint(2, 4096, (1, 16)), 24)
            pool = model.apex.device.cache.pools[HIGH]
            before = Counter(expert.layer for expert in pool.slot_of)
            model(torch.randint(2, 4096, (1, 512)))
            moved[admission] = (before - Counter(expert.layer for expert in pool.slot_of)).total()
        assert moved["stream"] <= pool.most_passing < moved["evict"]

    def test_floor_never_waits_for_low(self, bundled_apex):
        model = apex_engine.load(bundled_apex, memory="40%", low_share="floor", prefetch=0)
        greedy(model, torch.randint(2, 4096, (1, 20)), 20)
        stats = model.apex.stats()
        assert stats["resident"]["low"] == 64 and stats["hit_rate"]["low"] == 1.0 and stats["hit_rate"]["high"] < 1
        assert stats["calls"]["degraded"] == 0

    def test_upgrades_come_later_and_are_counted(self, bundled_apex):
        model = apex_engine.load(bundled_apex, memory="40%", low_share="floor", upgrade="async")
        greedy(model, torch.randint(2, 4096, (1, 20)), 40)
        stats = model.apex.stats()
        assert stats["calls"]["degraded"] > 0 and stats["loads"]["high"] == 0 < stats["prefetch"]["useful_bytes"]
        assert stats["resident"]["high"] > 0

    def test_all_low_is_all_low_in_the_first_layer_too(self, bundled_apex):
        model = apex_engine.load(bundled_apex, mode="deterministic", t1=-1.0, t2=1.0, memory="50%")
        model(torch.randint(2, 4096, (1, 20)))
        assert model.apex.stats()["share_of_calls"]["low"] == 1.0

    def test_dropping_a_model_ends_its_threads(self, tiny):
        def loaders():
            return [thread for thread in threading.enumerate() if thread.name.startswith("apex-loader")]

        gc.collect()
        before = len(loaders())
        model = apex_engine.load(tiny()[1])
        model(some_ids())
        assert len(loaders()) > before
        del model
        gc.collect()
        assert len(loaders()) == before

    def test_many_processes_open_one_checkpoint(self, tiny):
        program = (
            "import sys, torch, apex_engine\n"
            "torch.manual_seed(0)\n"
            "model = apex_engine.load(sys.argv[1], dtype=torch.float32, mode='exact', memory='40%')\n"
            "print(model(torch.randint(2, 128, (1, 9))).logits.double().sum().item())"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([sys.executable, "-c", program, str(tiny()[1])], stdout=subprocess.PIPE, env=environment)
            for _ in range(3)
        ]
        said = {process.communicate()[0] for process in started}  # how long that takes is the machine's affair
        assert len(said) == 1 and said != {b""}

    def test_memory_does_not_grow_with_use(self, bundled_apex):
        model = apex_engine.load(bundled_apex, memory="25%")
        ids = torch.randint(2, 4096, (1, 12))

        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        for _ in range(8):
            greedy(model, ids, 3)
        before = resident()
        for _ in range(50):
            greedy(model, ids, 3)
        assert resident() - before < 4 << 20


class TestTrouble:
    def test_a_damaged_expert_is_named_and_the_engine_stays_usable(self, tiny, tmp_path):
        shutil.copytree(tiny()[1], tmp_path / "apex")
        manifest = Manifest.read(tmp_path / "apex")
        path = tmp_path / "apex" / manifest.layers[1].files[-1]
        content = bytearray(path.read_bytes())
        content[-1000:] = b"\xff" * 1000  # NaN in the last expert of layer 1
        path.write_bytes(content)
        model = apex_engine.load(tmp_path / "apex", dtype=torch.float32, mode="exact", memory="100%")
        with pytest.raises(ApexError, match=r"layer 1 .*expert 5, HIGH twin .*checksum"):
            model(some_ids(4, 30))
        model.apex.check_integrity()
        path.write_bytes((tiny()[1] / manifest.layers[1].files[-1]).read_bytes())
        reloaded = model(some_ids(4, 30)).logits
        assert torch.isfinite(reloaded).all()

    def test_unknown_option(self, tiny):
        with pytest.raises(ApexError, match="unknown option memroy: did you mean memory"):
            apex_engine.load(tiny()[1], memroy="1GiB")

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"device": "banana"}, "unknown device banana"),
            ({"dtype": "int8"}, "none to compute in"),
            ({"dtype": torch.int8}, "none to compute in"),
            ({"link": 3}, "link '3' is not understood"),
            ({"host_memory": "50%"}, "a tier behind a GPU"),
        ],
    )
    def test_options_that_no_model_can_have(self, tiny, options, message):
        with pytest.raises(ApexError, match=message):
            apex_engine.load(tiny()[1], **options)

    def test_not_an_apex_checkpoint(self, tiny, tmp_path):
        with pytest.raises(ApexError, match="not a finished apex checkpoint"):
            apex_engine.load(tiny()[0])
        with pytest.raises(ApexError, match="is no directory"):
            apex_engine.load(tmp_path / "nothing")

    def test_auto_class_refuses_an_unfinished_checkpoint(self, tiny, tmp_path):
        shutil.copytree(tiny()[1], tmp_path / "apex")
        (tmp_path / "apex" / "apex.json").unlink()
        with pytest.raises(ApexError, match="not a finished apex checkpoint"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "apex")

    def test_another_version_of_the_checkpoint(self, tiny, tmp_path):
        shutil.copytree(tiny()[1], tmp_path / "apex")
        text = (tmp_path / "apex" / "apex.json").read_text()
        (tmp_path / "apex" / "apex.json").write_text(text.replace('"version": 2,', '"version": 9,', 1))
        with pytest.raises(ApexError, match="format version 9"):
            apex_engine.load(tmp_path / "apex")

    def test_threads_share_one_model(self, bundled_apex):
        model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="exact", memory="15%")
        prompts = torch.randint(2, 4096, (3, 12))
        alone = [greedy(model, prompt[None], 10) for prompt in prompts]
        found = [None] * 3

        def run(i):
            found[i] = greedy(model, prompts[i][None], 10)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
        model.apex.check_integrity()
        stats = model.apex.stats()
        assert stats["sequences"] == 6 and stats["tokens"] == {"prefill": 6 * 12, "decode": 6 * 9}
        assert stats["calls"]["total"] == 6 * (12 + 9) * 8 * 2

    def test_close(self, tiny):
        model = apex_engine.load(tiny()[1])
        model(some_ids())
        slots = weakref.ref(model.apex.device.cache.pools[HIGH])
        before = len(os.listdir("/proc/self/fd"))
        model.apex.close()
        assert len(os.listdir("/proc/self/fd")) == before - 4
        assert slots() is None, "the slots are still there"
        with pytest.raises(ApexError, match="was closed"):
            model(some_ids())

    def test_damaged_config(self, tiny, tmp_path):
        shutil.copytree(tiny()[1], tmp_path / "apex")
        (tmp_path / "apex" / "config.json").write_text("{")
        with pytest.raises(ApexError, match=r"config.json cannot be read"):
            apex_engine.load(tmp_path / "apex")

    def test_without_input_the_model_says_so(self, tiny):
        with pytest.raises(ValueError, match="input_ids"):
            apex_engine.load(tiny()[1])()


def test_a_model_that_is_dropped_closes_its_files(tiny):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    model = apex_engine.load(tiny()[1])
    model(some_ids())
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_exact_on_cuda(bundled, bundled_apex):
    ids = torch.randint(2, 4096, (1, 20))
    reference = reference_of(bundled).to("cuda")
    model = apex_engine.load(bundled_apex, dtype=torch.float32, device="cuda", mode="exact", memory="25%")
    assert torch.equal(greedy(model, ids.cuda(), 24), greedy(reference, ids.cuda(), 24))


def test_save_model_is_seeded(tmp_path):
    save_model(tmp_path / "a")
    save_model(tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
