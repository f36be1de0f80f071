import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apex_engine.core.scorer import scores, wanted

HIGH, LOW, SKIP = 2, 1, 0

GATES = arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 8)), elements=st.floats(0, 100, width=32))
THRESHOLDS = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


def test_scores_by_hand():
    gates = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], np.float32)  # the second row is not sorted
    np.testing.assert_allclose(scores(gates), [[0, 0.5, 0.8], [0.9, 0, 0.6]], atol=1e-6)


def test_scores_are_normalised_and_ignore_sign():
    gates = np.array([[0.5, -0.3, 0.2]], np.float32)
    np.testing.assert_allclose(scores(gates * -7), [[0, 0.5, 0.8]], atol=1e-6)


@pytest.mark.parametrize(
    ("second", "expected"),
    [(0.41, HIGH), (0.39, LOW), (0.11, LOW), (0.09, SKIP)],
)
def test_mixtral_thresholds(second, expected):
    gates = np.array([[1 - second, second]], np.float32)
    assert wanted(gates, (0.6, 0.9)).tolist() == [[HIGH, expected]]


def test_a_score_on_the_threshold_belongs_below_it():
    gates = np.array([[0.5, 0.25, 0.25]], np.float32)  # scores 0, 0.5, 0.75
    assert wanted(gates, (0.5, 0.75)).tolist() == [[HIGH, HIGH, LOW]]


@given(GATES, THRESHOLDS)
def test_the_first_is_high_and_precision_falls_with_the_gate(gates, thresholds):
    found = wanted(gates, thresholds)
    order = np.argsort(-np.abs(gates), axis=1, kind="stable")
    ranked = np.take_along_axis(found, order, 1)
    assert (ranked[:, 0] == HIGH).all()
    assert (np.diff(ranked, axis=1) <= 0).all()


@given(GATES, st.randoms())
def test_each_token_is_scored_alone_and_in_any_order(gates, random):
    found = wanted(gates, (0.6, 0.9))
    for row, expected in zip(gates, found, strict=True):
        assert wanted(row[None], (0.6, 0.9)).tolist() == [expected.tolist()]
    columns = list(range(gates.shape[1]))
    random.shuffle(columns)
    if len(set(gates[0].tolist())) == gates.shape[1]:  # ties are broken by position
        assert wanted(gates[:1, columns], (0.6, 0.9)).tolist() == [found[0, columns].tolist()]


@given(GATES)
def test_a_threshold_of_one_is_the_limit(gates):
    """Nothing is skipped at t2 = 1, and nothing is LOW at t1 = 1, whatever the rounding of the sums."""
    assert (wanted(gates, (-1.0, 1.0)) == LOW).all()
    assert (wanted(gates, (1.0, 1.0)) == HIGH).all()


def test_extremes():
    gates = np.array([[0.7, 0.2, 0.1]], np.float32)
    assert (wanted(gates, (1.0, 1.0)) == HIGH).all()
    assert (wanted(gates, (-1.0, 1.0)) == LOW).all()
    assert wanted(gates, (0.0, 0.0)).tolist() == [[HIGH, SKIP, SKIP]]
    assert (wanted(np.zeros((1, 3), np.float32), (0.6, 0.9)) == HIGH).all()


def test_a_gate_that_is_no_number_is_never_dropped():
    assert (wanted(np.array([[np.nan, 0.2, 0.1]], np.float32), (0.0, 0.0)) == HIGH).all()


@pytest.mark.parametrize(
    ("thresholds", "expected"),
    [((0.6,), [1, 1, 0, 0]), ((0.4, 0.6, 0.8), [3, 2, 1, 0]), ((0.0, 0.5, 0.6, 0.7), [4, 3, 1, 0])],
)
def test_each_threshold_that_a_score_passes_costs_a_precision(thresholds, expected):
    gates = np.array([[0.45, 0.2, 0.2, 0.15]], np.float32)  # scores 0, .45, .65, .85
    assert wanted(gates, thresholds).tolist() == [expected]
    assert wanted(np.repeat(gates, 2, 0), thresholds).tolist() == [expected] * 2
