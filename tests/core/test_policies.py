import numpy as np
import pytest

from apex_engine.core.events import PassBegins, Stream, Use
from apex_engine.core.policies import POLICIES
from apex_engine.core.vocabulary import Geometry

HIGH, LOW = 2, 1


def made(name, layers=4, experts=3):
    return POLICIES[name](Geometry(layers, experts, (0, 25, 100)))


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return made(request.param)


def begin(policy, tokens, new_sequence=False):
    Stream(policy).emit(PassBegins("decode", tokens, new_sequence))


def use(policy, layer, expert, precision, count):
    Stream(policy).emit(Use(layer, expert, precision, count, 0.5, 0))


def priority(policy, layer, expert, precision=HIGH, now=0):
    (value,) = policy.values(np.array([layer]), np.array([expert]), precision, now)
    return value


class TestContract:
    def test_what_is_used_outranks_what_is_not(self, policy):
        begin(policy, 1, new_sequence=True)
        use(policy, 2, 1, HIGH, 1)
        assert priority(policy, 2, 1, now=2) > priority(policy, 2, 0, now=2)

    def test_a_new_sequence_forgets(self, policy):
        begin(policy, 5, new_sequence=True)
        fresh = [priority(policy, layer, e) for layer in range(4) for e in range(3)]
        use(policy, 0, 1, HIGH, 3)
        use(policy, 3, 2, LOW, 1)
        begin(policy, 5, new_sequence=True)
        assert [priority(policy, layer, e) for layer in range(4) for e in range(3)] == fresh

    def test_asking_changes_nothing(self, policy):
        begin(policy, 2)
        use(policy, 1, 1, LOW, 2)
        first = policy.values(np.arange(4), np.arange(4) % 3, LOW, 2)
        assert np.array_equal(first, policy.values(np.arange(4), np.arange(4) % 3, LOW, 2))

    def test_priorities_are_finite_and_one_for_each(self, policy):
        values = policy.values(np.array([0, 1, 2]), np.array([2, 1, 0]), HIGH, 3)
        assert values.shape == (3,) and np.isfinite(values).all()


def test_lru_ranks_by_the_last_use_of_each_twin():
    lru = made("lru", 2, 3)
    for expert, precision in [(0, HIGH), (1, HIGH), (0, LOW), (0, HIGH)]:
        use(lru, 0, expert, precision, 1)
    assert priority(lru, 0, 1, HIGH) < priority(lru, 0, 0, LOW) < priority(lru, 0, 0, HIGH)
    assert priority(lru, 0, 2) == 0


def test_lfu_counts_the_uses_of_each_twin():
    lfu = made("lfu", 2, 3)
    for expert, precision, count in [(0, HIGH, 2), (1, HIGH, 3), (0, LOW, 9)]:
        use(lfu, 0, expert, precision, count)
    assert [priority(lfu, 0, e) for e in range(3)] == [2, 3, 0] and priority(lfu, 0, 0, LOW) == 9


def test_lfru_by_hand():
    lfru = made("lfru", 2, 3)
    begin(lfru, 4)
    use(lfru, 0, 0, HIGH, 4)
    use(lfru, 0, 1, HIGH, 1)
    for _ in range(3):
        begin(lfru, 1)
    use(lfru, 0, 1, HIGH, 1)
    assert priority(lfru, 0, 0) == 4 / 4 and priority(lfru, 0, 1) == 2 / 1


def test_next_use_by_hand():
    """Four layers. Of two tokens both use expert 0 of layer 1 and one expert 1; then one more uses expert 1 alone."""
    policy = made("next-use", 4, 3)
    begin(policy, 2)
    use(policy, 1, 0, HIGH, 2)
    use(policy, 1, 1, HIGH, 1)
    begin(policy, 1)
    use(policy, 1, 1, HIGH, 1)

    def after(first, second):
        """Shares that two tokens and then one leave, by whether they used it: of the recent, and of all."""
        return [(first * (1 - fades**2) * fades + second * (1 - fades)) for fades in (0.5, 0.98)]

    whole = after(1, 1)[1]
    first, second = (0.3 * recent + 0.7 * often / whole for recent, often in (after(1, 0), after(0.5, 1)))
    # at layer 0, layer 1 is next; at layer 1 it comes round in four layers
    assert priority(policy, 1, 0, now=0) == pytest.approx(first / (1 + 2))
    assert priority(policy, 1, 1, now=1) == pytest.approx(second / (4 + 2))
    assert priority(policy, 1, 0, LOW) < priority(policy, 1, 0, HIGH)
    # never used: the farther layer goes first
    assert priority(policy, 0, 2, now=1) > priority(policy, 1, 2, now=1)


def test_lcu_by_hand():
    """Four layers, B_low / B_high = 1/4; a prompt of 8 tokens, then one token that is now at layer 2."""
    lcu = made("lcu", 4, 3)
    begin(lcu, 8, new_sequence=True)
    use(lcu, 1, 0, HIGH, 6)
    use(lcu, 1, 0, LOW, 2)
    use(lcu, 3, 2, HIGH, 4)
    use(lcu, 1, 1, LOW, 4)
    begin(lcu, 1)
    use(lcu, 1, 0, HIGH, 1)
    # (1, 0): C = 7 + 2/4; used in this pass; its layer comes round in 3 layers.
    assert priority(lcu, 1, 0, now=2) == pytest.approx(7.5 / 9 + 1 / 3.1)
    # (3, 2): not yet reached in this pass, used in the last one; one layer ahead.
    assert priority(lcu, 3, 2, now=2) == pytest.approx(4 / 9 + 1 / 1.1)
    # (1, 1): layer 1 has passed without it.
    assert priority(lcu, 1, 1, now=2) == pytest.approx(1 / 9)
    # The same for both twins of an expert.
    assert priority(lcu, 1, 0, LOW, now=2) == priority(lcu, 1, 0, HIGH, now=2)
