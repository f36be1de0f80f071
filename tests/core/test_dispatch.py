import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex_engine.config import MODES
from apex_engine.core.rules import Rules
from apex_engine.core.thresholds import Thresholds

SKIP, LOW, HIGH = 0, 1, 2


class Resident:
    """A residency made of (expert, precision) pairs of layer 3."""

    def __init__(self, *pairs):
        self.pairs = set(pairs)

    def best(self, expert):
        assert expert.layer == 3
        return max((p for e, p in self.pairs if e == expert.expert), default=SKIP)

    def find(self, expert, precision):
        return 0 if (expert.expert, precision) in self.pairs else None


def dispatch(chosen, wanted, mode, resident, degrade=False):
    rules = Rules(mode, Thresholds(()), HIGH, degrade)
    if mode == "exact":
        wanted = rules.wished(3, wanted.astype(np.float32))
    return rules.served(3, chosen, wanted, resident)


@pytest.mark.parametrize(
    ("wish", "resident", "served"),
    [
        (HIGH, {HIGH}, HIGH),
        (HIGH, {LOW}, HIGH),
        (HIGH, set(), HIGH),
        (LOW, {HIGH, LOW}, HIGH),
        (LOW, {HIGH}, HIGH),
        (LOW, {LOW}, LOW),
        (LOW, set(), LOW),
        (SKIP, {HIGH, LOW}, HIGH),
        (SKIP, {LOW}, LOW),
        (SKIP, {HIGH}, HIGH),
        (SKIP, set(), SKIP),
    ],
)
def test_the_table(wish, resident, served):
    uses = dispatch(np.array([[5]]), np.array([[wish]], np.int8), "adaptive", Resident(*((5, p) for p in resident)))
    assert [(use.expert, use.precision) for use in uses] == [(5, served)]


def test_several_tokens_are_served_the_highest_any_wants():
    chosen = np.array([[1, 2], [2, 1], [3, 2]])
    wanted = np.array([[HIGH, SKIP], [HIGH, LOW], [HIGH, SKIP]], np.int8)
    uses = dispatch(chosen, wanted, "adaptive", Resident())
    assert [(u.expert, u.precision, u.tokens.tolist(), u.choices.tolist()) for u in uses] == [
        (1, HIGH, [0, 1], [0, 1]),
        (2, HIGH, [0, 1, 2], [1, 0, 1]),
        (3, HIGH, [2], [0]),
    ]


def test_deterministic_splits_an_expert_by_what_each_token_wants():
    chosen = np.array([[1, 2], [2, 1], [3, 2]])
    wanted = np.array([[HIGH, SKIP], [HIGH, LOW], [HIGH, LOW]], np.int8)
    uses = dispatch(chosen, wanted, "deterministic", None)
    assert [(u.expert, u.precision, u.tokens.tolist()) for u in uses] == [
        (1, HIGH, [0]),
        (1, LOW, [1]),
        (2, HIGH, [1]),
        (2, LOW, [2]),
        (2, SKIP, [0]),
        (3, HIGH, [2]),
    ]


@given(st.integers(0, 6), st.integers(1, 4), st.sampled_from(MODES), st.randoms())
def test_every_pair_is_served_exactly_once(tokens, k, mode, random):
    chosen = np.array([random.sample(range(8), k) for _ in range(tokens)], np.int64).reshape(tokens, k)
    wanted = np.array([[random.choice([SKIP, LOW, HIGH]) for _ in range(k)] for _ in range(tokens)], np.int8).reshape(
        tokens, k
    )
    resident = {(e, p) for e in range(8) for p in (LOW, HIGH) if random.random() < 0.4}
    uses = dispatch(chosen, wanted, mode, Resident(*resident))
    served = np.full(chosen.shape, -1)
    for use in uses:
        assert (served[use.tokens, use.choices] == -1).all()
        assert (chosen[use.tokens, use.choices] == use.expert).all()
        served[use.tokens, use.choices] = use.precision
    assert (served >= 0).all()
    if mode == "exact":
        assert (served == HIGH).all()
    elif mode == "deterministic":
        assert (served == wanted).all()
    else:
        assert (served >= wanted).all()  # nobody gets less than the score says


@pytest.mark.parametrize(
    ("wish", "resident", "served", "degraded"),
    [(3, {1, 2}, 3, 2), (2, {1}, 2, 1), (2, {1, 3}, 3, 3), (1, set(), 1, 1), (0, {2}, 2, 2), (3, set(), 3, 3)],
)
def test_any_number_of_twins(wish, resident, served, degraded):
    memory = Resident(*((5, p) for p in resident))
    for degrade, expected in ((False, served), (True, degraded)):
        (one,) = dispatch(np.array([[5]]), np.array([[wish]], np.int8), "adaptive", memory, degrade)
        assert one.precision == expected
