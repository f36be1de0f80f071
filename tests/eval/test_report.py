import builtins
import copy
import json
import math
from html.parser import HTMLParser

import pytest

from apex_engine.checkpoint.manifest import Manifest, Twin
from apex_engine.eval.report import plots
from apex_engine.eval.report.contents import twins
from apex_engine.eval.report.files import write
from apex_engine.eval.report.markdown import markdown
from apex_engine.eval.report.page import html
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat

VOID = {"meta", "br", "img", "hr", "link", "input"}


def task(name, reference, value, stderr, verdict, **more):
    found = {"value": value, "difference": value - reference, "stderr": stderr, "relative": False, "verdict": verdict}
    found |= {"right_to_wrong": 5, "wrong_to_right": 2} | more
    common = {"task": name, "metric": "acc", "items": 300, "higher_is_better": True, "reference": reference}
    return common | {"modes": {"deterministic": found}}


@pytest.fixture
def report():
    perplexity = {"value": 30.3, "difference": 0.0067, "stderr": 0.001, "relative": True, "verdict": "within 1 %"}
    return {
        "verdict": "within 1 %",
        "limit": 0.01,
        "checkpoint": {"folder": "tiny-apex", "low": {"up": "int2", "down": "int2"}, "low_bits": 2.52},
        "reference": "all HIGH (bfloat16) twins of the same checkpoint, mode exact",
        "thresholds": {"t1": [0.75] + [0.5] * 7, "t2": [0.95] * 8, "from": "calibrated for KL <= 0.02"},
        "modes": ["deterministic"],
        "settings": {"tasks": "apex_demo", "limit": None, "num_fewshot": None, "dtype": "float32"},
        "tasks": [
            task("demo_kjv", 0.81, 0.804, 0.0012, "within 1 %"),
            task("demo_drama", 0.62, 0.60, 0.015, "not shown"),
            task("demo_code", 0.7, 0.64, 0.02, "worse"),
            {
                "task": "demo_text",
                "metric": "word_perplexity",
                "items": 40,
                "higher_is_better": False,
                "reference": 30.1,
            }
            | {"modes": {"deterministic": perplexity | {"right_to_wrong": None, "wrong_to_right": None}}},
        ],
        "mean": {"deterministic": {"tasks": 3, "drop": 0.004, "stderr": 0.003, "verdict": "within 1 %"}},
        "text": {
            "what": "drama, kjv",
            "tokens": 12000,
            "reference_perplexity": 30.1,
            "modes": {
                "deterministic": {
                    **{"perplexity": 30.3, "change": 0.0067, "change_stderr": 0.001},
                    **{"kl": 0.0125, "kl_stderr": 0.0004, "agreement": 0.957},
                }
            },
            "by_text": [
                {
                    "name": "kjv",
                    "modes": {"deterministic": {"perplexity": 24.09, "change": -0.0004, "kl": 0.013}},
                    "reference_perplexity": 24.1,
                }
            ],
        },
        "ledger": {
            "deterministic": {
                "calls": {"high": 53000, "low": 46000, "skip": 1000},
                "share_of_calls": {"high": 0.53, "low": 0.46, "skip": 0.01},
                "share_of_gate_mass": {"high": 0.781, "low": 0.216, "skip": 0.003},
                "bytes_read": {"high": 3 * 2**30, "low": 1536},
                "hit_rate": {"high": 0.5, "low": None},
            }
        },
        "not_measured": [],
        "curve": [
            {"kl": 0.01, "share_low": 0.3, "share_skip": 0.0, "gate_mass_low": 0.12},
            {"kl": 0.02, "share_low": 0.46, "share_skip": 0.01, "gate_mass_low": 0.21},
            {"kl": 0.05, "share_low": 0.7, "share_skip": 0.04, "gate_mass_low": 0.4},
        ],
        "versions": {"apex_engine": "0.1.0", "commit": None, "torch": "2.13.0"},
        "hardware": "AMD EPYC, 2 cores",
        "seconds": {"reference": 12.3, "deterministic": 15.2},
    }


@pytest.fixture
def bare(report):
    empty = {"verdict": "not shown", "tasks": [], "mean": {}, "text": None, "ledger": {}, "curve": None, "seconds": {}}
    return report | empty | {"not_measured": ["text: no network for wikitext", "tasks: none asked for"]}


class Page(HTMLParser):
    """Every element closed in order, and every attribute kept."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.words, self.seen = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def nones(value):
    """The same shape with None for every float."""
    if isinstance(value, dict):
        return {key: nones(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nones(item) for item in value]
    return None if isinstance(value, float) else value


def test_markdown_shows_the_numbers(report):
    text = markdown(report)
    assert text.startswith(
        "# Delta report\n\n**deterministic: mean accuracy drop 0.40 ± 0.30 points over 3 tasks: within 1 %. Worse in 1 of 4 "
        "single metrics.**\n"
    )
    for line in (
        "| demo_kjv | acc | deterministic | 300 | 81.0% | 80.4% | -0.60 ± 0.12 points | within 1 % | 5 / 2 |",
        "| demo_text | word_perplexity | deterministic | 40 | 30.10 | 30.30 | +0.67 ± 0.10 % | within 1 % | - |",
        "| mean of 3 | accuracy | deterministic |  |  |  | -0.40 ± 0.30 points | within 1 % |  |",
        "| all | deterministic | 30.10 | 30.30 | +0.67 ± 0.10 % | 0.0125 ± 0.0004 | 95.7% |",
        "| kjv | deterministic | 24.10 | 24.09 | -0.04 % | 0.0130 | - |",
        "| deterministic | calls | 53,000 | 46,000 | 1,000 |",
        "| deterministic | bytes read | 3.0 GiB | 1.5 KiB | - |",
        "T1: 0.75, 7 × 0.5",
        "| 0.0200 | 46.0% | 1.0% | 21.0% |",
        "| low | up int2, down int2 |",
        "| limit | - |",
    ):
        assert line in text.splitlines()
    assert 'plus 1.645 standard errors is at most 1 point. "worse"' in text
    assert "Not measured" not in text


def test_twins_beyond_two_go_by_their_forms(report):
    words = {"bfloat16": 0.5, "int4": 0.3, "int2": 0.15, "skip": 0.05}
    report["ledger"]["deterministic"]["share_of_calls"] = words
    report["ledger"]["deterministic"]["calls"] = {"bfloat16": 50, "int4": 30, "int2": 15, "skip": 5}
    lines = markdown(report).splitlines()
    assert "| mode |  | bfloat16 | int4 | int2 | skipped |" in lines
    assert "| deterministic | share of calls | 50.0% | 30.0% | 15.0% | 5.0% |" in lines
    assert {"bfloat16", "int4", "int2", "skipped"} <= set(Page(html(report)).words)


def test_the_contents_name_as_many_twins_as_there_are():
    shape = ExpertShape(64, 64, True)
    forms = {"int2": ("int2", "int3"), "int8": ("int8", "int8"), "bfloat16": ("bfloat16", "bfloat16")}
    made = [Twin(name, Layout(shape, *(matrix(form) for form in both))) for name, both in forms.items()]

    def found(*some):
        return twins(Manifest("source", "print", {"low_method": "clip"}, 4, some, (), 0))

    assert found(*made) == {
        **{"source": "source", "fingerprint": "print", "bfloat16": "bfloat16", "low_method": "clip"},
        **{"int8": {"up": "int8", "down": "int8"}, "int2": {"up": "int2", "down": "int3"}},
        **{"int8_bits": made[1].layout.bits_per_weight, "int2_bits": made[0].layout.bits_per_weight},
    }
    assert list(found(made[0], made[2])) == ["source", "fingerprint", "high", "low", "low_method", "low_bits"]
    assert found(made[2])["high"] == "bfloat16" and "low" not in found(made[2])


def matrix(form):
    return MatrixFormat(form, 64 if form in ("int2", "int3") else 0)


def test_every_row_of_a_table_is_as_wide_as_its_header(report):
    report["tasks"][0]["task"] = "a|b\\|c\nd"
    rows = [
        line.replace("\\\\", "").replace("\\|", "") for line in markdown(report).splitlines() if line.startswith("|")
    ]
    tables = [line.count("|") for line in rows]
    assert tables.count(10) == 2 + 5 and "a\\|b\\\\\\|c d" in markdown(report)


def test_html_is_one_balanced_page_that_asks_for_nothing(report):
    text = html(report)
    page = Page(text)
    assert page.seen.count("svg") == 3 and "script" not in page.seen
    links = [name for name, value in page.attributes if value and "http" in value]
    assert all(name.startswith("xmlns") for name in links) and text.count("http") == len(links)
    assert all(value.startswith("#") for name, value in page.attributes if name in ("src", "href", "xlink:href"))
    assert "@import" not in text and "url(h" not in text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {f"#{i}" for i in ids} >= {value for name, value in page.attributes if name == "xlink:href"}
    assert text == html(copy.deepcopy(report))


def test_plots_take_the_colours_of_the_page(report):
    text = html(report)
    assert "currentColor" in text and not any(colour in text for colour in plots.CSS_COLOURS)
    assert all(f"var(--{kind})" in text for kind in plots.POINTS)


def test_html_shows_what_markdown_shows(report):
    words = "|".join(Page(html(report)).words)
    for text in ("-0.60 ± 0.12 points", "0.0125 ± 0.0004", "3.0 GiB", "T1: 0.75, 7 × 0.5", "calibrated for KL <= 0.02"):
        assert text in words


@pytest.mark.parametrize("verdict, kind", [("within 1 %", "good"), ("not shown", "open"), ("worse", "bad")])
def test_a_verdict_is_a_word_with_a_colour(report, verdict, kind):
    report["verdict"] = verdict
    text = html(report)
    assert f'<p class="headline {kind}">deterministic: mean accuracy drop' in text
    assert f'<td class="{kind}">{verdict}</td>' in text
    assert f"over 3 tasks: {verdict}" in text


def test_single_metrics_that_are_worse_are_counted_beside_the_verdict(report):
    report["verdict"] = "worse"
    assert "over 3 tasks: worse. Worse in 1 of 4 single metrics.**" in markdown(report)


def test_a_gain_and_a_second_mode(report):
    report["modes"].append("adaptive")
    report["mean"]["adaptive"] = {"tasks": 1, "drop": -0.002, "stderr": None, "verdict": "not shown"}
    for row in report["tasks"]:
        row["modes"]["adaptive"] = dict(row["modes"]["deterministic"])
    assert (
        "**adaptive: mean accuracy gain 0.20 points over 1 task: not shown. Worse in 1 of 4 single metrics.**"
        in markdown(report)
    )
    assert "demo_kjv acc, adaptive" in "|".join(Page(html(report)).words)


def test_strings_are_escaped(report):
    nasty = '<script>alert(\'$x$ & "$")</script>'
    report["tasks"][0]["task"] = report["settings"]["tasks"] = report["hardware"] = nasty
    report["not_measured"] = [nasty]
    page = Page(html(report))
    assert "script" not in page.seen and "<script" not in html(report)
    assert f"{nasty} acc" in page.words  # a label of the plot: no mathematics between its dollars
    assert "\\<script>" in markdown(report) and "| <" not in markdown(report)


def test_what_was_not_measured_comes_first(bare):
    text = markdown(bare)
    assert text.startswith(
        "# Delta report\n\n**deterministic: not shown (no mean accuracy).**\n\n## Not measured\n\ntext: no"
    )
    page = Page(html(bare))
    assert ("class", "warning") in page.attributes and "svg" not in page.seen


def test_missing_numbers_are_dashes(report):
    empty = nones(report) | {"limit": 0.01}
    assert "None" not in markdown(empty) and "nan" not in markdown(empty)
    assert "| demo_kjv | acc | deterministic | 300 | - | - | - | within 1 % | 5 / 2 |" in markdown(empty)
    assert "None" not in html(empty)
    Page(html(empty))


def test_write_keeps_the_numbers(report, tmp_path):
    report["tasks"][0]["modes"]["deterministic"]["stderr"] = math.nan
    report["seconds"]["reference"] = -math.inf
    paths = write(report, tmp_path / "new")
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    assert sorted(paths) == sorted((tmp_path / "new").iterdir())
    found = json.loads(paths[0].read_text(), parse_constant=pytest.fail)
    assert found["tasks"][0]["modes"]["deterministic"]["stderr"] is None and found["seconds"]["reference"] is None
    assert list(found) == list(report)
    assert paths[1].read_text() == markdown(report) == markdown(found) and "nan" not in paths[1].read_text()
    assert paths[2].read_text() == html(report) == html(found)


def test_a_failure_leaves_whole_files_only(report, tmp_path, monkeypatch):
    def broken(plot):
        raise RuntimeError("no ink")

    monkeypatch.setattr("apex_engine.eval.report.page.svg", broken)
    with pytest.raises(RuntimeError, match="no ink"):
        write(report, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_without_matplotlib_the_page_says_so(report, monkeypatch):
    real = builtins.__import__

    def absent(name, *args):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    page = Page(html(report))
    assert "svg" not in page.seen and page.words.count("Not drawn: this needs matplotlib.") == 3
