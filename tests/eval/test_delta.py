import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex_engine.eval.delta import OPEN, WITHIN, WORSE, compare_values, mean_drop, overall, task_rows, verdict


def test_accuracy_by_hand():
    found = compare_values([1, 1, 0, 0], [1.0, 0.0, 0.0, 1.0], "acc")
    assert (found.reference, found.value, found.difference) == (0.5, 0.5, 0.0)
    assert (found.right_to_wrong, found.wrong_to_right) == (1, 1)
    assert found.stderr == pytest.approx(math.sqrt(3) / 4) and not found.relative


def test_no_flip_in_a_few_items_is_no_certainty():
    few, many = compare_values([1, 0] * 6, [1, 0] * 6, "acc"), compare_values([1, 0] * 150, [1, 0] * 150, "acc")
    assert few.verdict(True) == OPEN and many.verdict(True) == WITHIN


def test_metrics_of_all_items_are_named_not_compared():
    rows, skipped = task_rows(result([(1, 0), (0, 1)], "f1"), {"m": result([(1, 0), (0, 1)], "f1")})
    assert rows == [] and skipped == ["t: f1 has no value of a single item"]


def test_values_between_are_no_flips():
    found = compare_values([0.2, 0.9], [0.3, 0.9], "f1")
    assert found.difference == pytest.approx(0.05) and found.right_to_wrong is None


def test_perplexity_of_documents_by_hand():
    """Two documents of 2 and 6 words: the loss is that of all words, not the mean of the documents'."""
    found = compare_values([(-2.0, 2), (-12.0, 6)], [(-2.2, 2), (-12.6, 6)], "word_perplexity")
    assert found.reference == pytest.approx(math.exp(14 / 8)) and found.value == pytest.approx(math.exp(14.8 / 8))
    assert found.difference == pytest.approx(math.expm1(0.1)) and found.relative
    assert found.stderr == pytest.approx(0)  # both rose by .1 a word
    single = compare_values([-1.0, -3.0], [-1.1, -3.3], "perplexity")
    assert single.difference == pytest.approx(math.expm1(0.2))
    assert single.stderr == pytest.approx(0.1)


@given(st.lists(st.tuples(st.floats(-50, -1), st.floats(-50, -1)), min_size=2, max_size=20))
def test_an_error_of_equal_weights_is_that_of_the_mean(pairs):
    before, after = zip(*pairs, strict=True)
    one = compare_values(list(before), list(after), "perplexity")
    same = compare_values([(b, 1) for b in before], [(a, 1) for a in after], "word_perplexity")
    plain = compare_values([-b - 0.5 for b in before], [-a - 0.5 for a in after], "loss")
    assert one.stderr == pytest.approx(same.stderr)
    if plain.right_to_wrong is None:  # values that are all 0 or 1 have another error
        assert one.stderr == pytest.approx(plain.stderr, abs=1e-9)


@pytest.mark.parametrize(
    ("drop", "error", "expected"),
    [
        (0.0, 0.005, WITHIN),
        (0.0, 0.007, OPEN),
        (-0.05, 0.03, WITHIN),
        (0.009, 0.0, WITHIN),
        (0.02, 0.02, OPEN),
        (0.02, 0.01, WORSE),
        (0.009, 0.001, OPEN),
        (0.0, None, OPEN),
    ],
)
def test_verdicts(drop, error, expected):
    assert verdict(drop, error) == expected


def result(values, metric="acc", task="t"):
    samples = [
        {"doc_id": i, "doc_hash": str(i), "filter": "none", "metrics": [metric, "byte_perplexity"], metric: value}
        for i, value in enumerate(values)
    ]
    return {"samples": {task: samples}, "higher_is_better": {task: {metric: metric == "acc"}}}


def test_rows_mean_and_overall():
    rows, _ = task_rows(result([1] * 100), {"deterministic": result([1] * 90 + [0] * 10)})
    (row,) = rows
    assert row["metric"] == "acc" and row["items"] == 100 and row["reference"] == 1.0
    mode = row["modes"]["deterministic"]
    assert mode["difference"] == pytest.approx(-0.1) and mode["verdict"] == WORSE and mode["right_to_wrong"] == 10
    mean = mean_drop(rows, "deterministic")
    assert mean["drop"] == pytest.approx(0.1) and mean["verdict"] == WORSE
    assert overall(rows, mean, "deterministic") == WORSE


def test_tasks_without_an_accuracy_have_no_mean():
    values = [-10.0, -20.0, -15.0]
    rows, _ = task_rows(result(values, "perplexity"), {"m": result([v - 1 for v in values], "perplexity")})
    assert mean_drop(rows, "m") == {} and overall(rows, {}, "m") == WORSE
    assert not rows[0]["higher_is_better"]


def test_other_items_are_refused():
    with pytest.raises(ValueError, match="not those of the reference"):
        task_rows(result([1, 0]), {"m": result([1, 0, 1])})
