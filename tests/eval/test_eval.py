"""The delta report from end to end, on a few items of the tasks that need no network."""

import ast
import contextlib
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")

import lm_eval.tasks

from apex_engine.core.vocabulary import ExpertId
from apex_engine.errors import ApexError
from apex_engine.eval.__main__ import main
from apex_engine.eval.lm import EngineLM
from apex_engine.memory.store import ExpertStore

ROOT = Path(__file__).resolve().parents[2]
TASKS = ["--tasks", "apex_demo_continuation_kjv,apex_demo_reference"]
SHORT = ["--max-length", "64", "--text-tokens", "256", "--length", "128", "--memory", "100%"]
QUICK = [*TASKS, "--limit", "4", *SHORT]
HEAVY = {"torch", "transformers", "lm_eval", "datasets", "matplotlib"}


def run(folder, output, *arguments):
    """The report."""
    main([str(folder), "-o", str(output), *map(str, arguments)])
    return json.loads((output / "report.json").read_text())


def without_times(report):
    return {**report, "seconds": None}


@pytest.fixture(scope="module", autouse=True)
def _no_census():
    """lm-eval asks pip and a dozen other programs what is installed, for a part of its result that no report has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture
def few_defaults(monkeypatch, tmp_path):
    """Of lm-eval's own tasks those of one folder: to read the thousands takes it ten seconds."""
    shutil.copytree(Path(lm_eval.tasks.__file__).parent / "arc", tmp_path / "defaults" / "arc")
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "defaults" / "manager.py"))


@contextlib.contextmanager
def counted(stop_after=None):
    """The requests that the model answers meanwhile; KeyboardInterrupt after `stop_after` of them."""
    seen, answer = [], EngineLM.answer

    def one(self, request):
        if len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append(request)
        return answer(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineLM, "answer", one)
        yield seen


@pytest.fixture(scope="module")
def whole(bundled_apex, tmp_path_factory):
    """A report, its folder, what was printed, and how many requests it took."""
    folder, printed = tmp_path_factory.mktemp("report"), io.StringIO()
    with counted() as seen, contextlib.redirect_stdout(printed):
        report = run(bundled_apex, folder, *QUICK)
    return SimpleNamespace(report=report, folder=folder, printed=printed.getvalue(), requests=len(seen))


def test_a_report(whole):
    assert "deterministic: mean accuracy" in whole.printed
    assert {row["task"] for row in whole.report["tasks"]} == set(TASKS[1].split(","))
    assert whole.report["text"]["modes"]["deterministic"]["kl"] > 0.001
    assert 0.2 < whole.report["ledger"]["deterministic"]["share_of_calls"]["low"] < 0.7
    assert (whole.folder / "report.html").is_file() and (whole.folder / "report.md").is_file()


def test_what_a_report_says_of_two_twins(whole):
    found = whole.report["checkpoint"]
    assert list(found) == ["folder", "source", "fingerprint", "high", "low", "low_method", "low_bits"]
    assert found["high"] == "bfloat16" and found["low"] == {"up": "int2", "down": "int2"} and found["low_bits"] < 3
    assert whole.report["reference"] == "all HIGH twins (bfloat16) of the same checkpoint, mode exact"
    assert list(whole.report["ledger"]["deterministic"]["share_of_calls"]) == ["high", "low", "skip"]


def test_the_same_report_after_a_kill(whole, bundled_apex, tmp_path):
    with counted(stop_after=whole.requests // 2 + 3) as before, pytest.raises(KeyboardInterrupt):
        run(bundled_apex, tmp_path, *QUICK)
    assert not (tmp_path / "report.json").exists()
    with counted() as after:
        resumed = run(bundled_apex, tmp_path, *QUICK)
    # The batch that was cut short is asked again.
    assert whole.requests <= len(before) + len(after) <= whole.requests + 8
    assert without_times(resumed) == without_times(whole.report)


def test_the_same_report_in_other_batches(whole, bundled_apex, tmp_path):
    single = run(bundled_apex, tmp_path, *QUICK, "--batch-size", 1)
    assert without_times(single) == without_times(whole.report)


def test_the_reports_see_all_low(bundled_apex, tmp_path):
    """The engine that is asked is in the mode that is reported on, not in the reference's."""
    task = ["--tasks", "apex_demo_perplexity_kjv", "--limit", 5, *SHORT, "--max-length", 255]
    report = run(bundled_apex, tmp_path, *task, "--t1", -1, "--t2", 1)
    assert report["verdict"] == "worse"
    (row,) = report["tasks"]
    assert row["modes"]["deterministic"]["difference"] > 0.04
    assert report["ledger"]["deterministic"]["share_of_calls"]["low"] == 1.0


def test_two_experts_swapped_turn_the_report_red(bundled, bundled_apex, tmp_path, monkeypatch):
    """Broken on purpose: what the reference is, through transformers, cannot be."""
    arguments = ["--tasks", "apex_demo_perplexity_kjv", "--limit", 3, *SHORT, "--reference", bundled]
    sound = run(bundled_apex, tmp_path / "sound", *arguments, "--modes", "exact")
    assert sound["verdict"] == "within 1 %" and abs(sound["text"]["modes"]["exact"]["kl"]) < 1e-5

    read = ExpertStore.read

    def swapped(self, expert, precision, part, start=0):
        other = {0: 1, 1: 0}.get(expert.expert, expert.expert)
        read(self, ExpertId(expert.layer, other), precision, part, start)

    monkeypatch.setattr(ExpertStore, "read", swapped)
    monkeypatch.setattr(ExpertStore, "verify", lambda *_: None)  # which would notice first
    broken = run(bundled_apex, tmp_path / "broken", *arguments, "--modes", "exact")
    assert broken["verdict"] == "worse" and broken["text"]["modes"]["exact"]["kl"] > 0.1
    assert '<p class="headline bad">' in (tmp_path / "broken" / "report.html").read_text()


@pytest.mark.usefixtures("few_defaults")
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
        ([*TASKS, "--max-length", "2"], "--max-length is 2"),
    ],
)
def test_mistakes_are_named(bundled_apex, tmp_path, arguments, message):
    with pytest.raises(ApexError, match=message):
        run(bundled_apex, tmp_path, *arguments)


@pytest.mark.usefixtures("few_defaults")
def test_tasks_that_need_a_network_say_so(bundled_apex, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ApexError, match="cannot be had"):
        run(bundled_apex, tmp_path, "--tasks", "arc_easy", "--limit", 1)


def test_help_needs_nothing_heavy():
    """What the command's module and those of its folder that it imports import before `main` is called."""
    seen, left = set(), ["__main__"]
    while left:
        module = left.pop()
        for node in ast.parse((ROOT / "eval" / f"{module}.py").read_text()).body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not {name.split(".")[0] for name in names} & HEAVY, module
                own = {name.removeprefix("apex_engine.eval.") for name in names if name.startswith("apex_engine.eval.")}
                left += own - seen
                seen |= own
    assert "options" in seen and "evaluation" not in seen
