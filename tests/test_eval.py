"""The delta report from end to end, on a few items of the tasks that need no network."""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import apex_engine  # noqa: E402
from apex_engine.core.vocabulary import ExpertId  # noqa: E402
from apex_engine.errors import ApexError  # noqa: E402
from apex_engine.eval import __main__ as command  # noqa: E402
from apex_engine.eval.lm import EngineLM  # noqa: E402
from apex_engine.memory.store import ExpertStore  # noqa: E402
from apex_engine.runtime.batch import Together  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--tasks", "apex_demo_continuation_kjv,apex_demo_reference", "--limit", "6", "--text-tokens", "512"]


def run(monkeypatch, folder, output, *arguments):
    """The report."""
    monkeypatch.setattr(sys, "argv", ["eval", str(folder), "-o", str(output), *map(str, arguments)])
    command.main()
    return json.loads((output / "report.json").read_text())


def without_times(report):
    return {**report, "seconds": None}


@pytest.fixture
def calls(monkeypatch):
    """How many requests the model answers; raises after `calls.stop_after` of them."""

    class Calls(list):
        stop_after = None

    seen = Calls()
    answer = EngineLM._answer

    def counted(self, request):
        if seen.stop_after is not None and len(seen) >= seen.stop_after:
            raise KeyboardInterrupt
        seen.append(1)
        return answer(self, request)

    monkeypatch.setattr(EngineLM, "_answer", counted)
    return seen


def test_a_report_and_the_same_again_after_a_kill_and_in_other_batches(
    bundled_apex, tmp_path, monkeypatch, calls, capsys
):
    report = run(monkeypatch, bundled_apex, tmp_path / "a", *QUICK)
    assert "deterministic: mean accuracy" in capsys.readouterr().out
    assert {row["task"] for row in report["tasks"]} == set(QUICK[1].split(","))
    assert report["text"]["modes"]["deterministic"]["kl"] > 0.001
    assert 0.2 < report["ledger"]["deterministic"]["share_of_calls"]["low"] < 0.7
    assert (tmp_path / "a" / "report.html").is_file() and (tmp_path / "a" / "report.md").is_file()

    whole = len(calls)
    calls.clear()
    calls.stop_after = whole // 2
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, bundled_apex, tmp_path / "b", *QUICK)
    assert not (tmp_path / "b" / "report.json").exists()
    calls.stop_after = None
    resumed = run(monkeypatch, bundled_apex, tmp_path / "b", *QUICK)
    assert whole <= len(calls) <= whole + 8  # the batch that was cut short is asked again
    assert without_times(resumed) == without_times(report)

    single = run(monkeypatch, bundled_apex, tmp_path / "c", *QUICK, "--batch-size", 1)
    assert without_times(single) == without_times(report)


def test_the_reports_see_all_low(bundled_apex, tmp_path, monkeypatch):
    """The engine that is asked is in the mode that is reported on, not in the reference's."""
    report = run(
        monkeypatch,
        bundled_apex,
        tmp_path,
        "--tasks",
        "apex_demo_perplexity_kjv",
        "--t1",
        -1,
        "--t2",
        1,
        "--text-tokens",
        512,
    )
    assert report["verdict"] == "worse"
    (row,) = report["tasks"]
    assert row["modes"]["deterministic"]["difference"] > 0.04
    assert report["ledger"]["deterministic"]["share_of_calls"]["low"] == 1.0


def test_two_experts_swapped_turn_the_report_red(bundled, bundled_apex, tmp_path, monkeypatch):
    """Broken on purpose: what the reference is, through transformers, cannot be."""
    arguments = ["--tasks", "apex_demo_perplexity_kjv", "--limit", 6, "--text-tokens", 512, "--reference", bundled]
    sound = run(monkeypatch, bundled_apex, tmp_path / "sound", *arguments, "--modes", "exact")
    assert sound["verdict"] == "within 1 %" and abs(sound["text"]["modes"]["exact"]["kl"]) < 1e-5

    read = ExpertStore.read

    def swapped(self, expert, precision, part, start=0):
        other = {0: 1, 1: 0}.get(expert.expert, expert.expert)
        read(self, ExpertId(expert.layer, other), precision, part, start)

    monkeypatch.setattr(ExpertStore, "read", swapped)
    monkeypatch.setattr(ExpertStore, "verify", lambda *_: None)  # which would notice first
    broken = run(monkeypatch, bundled_apex, tmp_path / "broken", *arguments, "--modes", "exact")
    assert broken["verdict"] == "worse" and broken["text"]["modes"]["exact"]["kl"] > 0.1
    assert '<p class="headline bad">' in (tmp_path / "broken" / "report.html").read_text()


def test_one_token_to_judge(bundled_apex, bundled):
    """Nothing is left to decode after the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    model = apex_engine.load(bundled_apex, dtype=torch.float32, mode="adaptive", t1=1.0, t2=1.0, prefetch=0)
    answers = [
        EngineLM(model, adaptive, tokenizer=tokenizer)._answer((None, [5, 6, 7], [8])) for adaptive in (True, False)
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
            [Instance("generate_until", {}, (r.args[0], {"until": ["\n"], "max_gen_toks": 9}), 0) for r in requests]
        )
        found[size], loads[size] = (likelihoods, texts), sum(model.apex.stats()["loads"].values())
        assert all(module.engine is model.apex for module in Together(model)._experts)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "no_such_task"], "no task no_such_task"),
        (["--mode", "exact"], "--modes exact"),
        (["--batch-size", "0"], "at least 1"),
        (["--reference", "/nowhere"], "no directory"),
        (["--reference", str(ROOT / "tests")], "no model transformers can load"),
        (["--apply-chat-template"], "no chat template"),
        (["--limit", "0"], "above 0"),
        (["--length", "1"], "at least 2"),
        (["--upgrade", "async"], "cannot be judged"),
        (["--text", "/nowhere"], "neither a file"),
        (["--num-fewshot", "-1"], "at least 0"),
        (["--include-path", "/nowhere"], "no directory"),
        (["--tasks", ""], "commas between"),
        (["-o", "/etc/passwd"], "/etc/passwd is no directory"),
        ([*QUICK[:2], "--max-length", "2"], "--max-length is 2"),
    ],
)
def test_mistakes_are_named(bundled_apex, tmp_path, monkeypatch, arguments, message):
    with pytest.raises(ApexError, match=message):
        run(monkeypatch, bundled_apex, tmp_path, *arguments)


def test_tasks_that_need_a_network_say_so(bundled_apex, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ApexError, match="cannot be had"):
        run(monkeypatch, bundled_apex, tmp_path, "--tasks", "arc_easy", "--limit", 1)
