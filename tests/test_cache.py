import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from apex_engine.cache import ExpertCache
from apex_engine.kernels.layout import ALIGN, ExpertShape, Layout, MatrixFormat
from apex_engine.policies import POLICIES
from apex_engine.vocabulary import ExpertId, Precision

HIGH, LOW = Precision.HIGH, Precision.LOW
SHAPE = ExpertShape(8, 8, False)
LAYOUTS = {
    HIGH: Layout(SHAPE, MatrixFormat("bfloat16"), MatrixFormat("bfloat16")),
    LOW: Layout(SHAPE, MatrixFormat("int2", 8), MatrixFormat("int2", 8)),
}
LAYERS, EXPERTS = 3, 4


def make_cache(slots=None, policy="lru"):
    policy = POLICIES[policy](LAYERS, EXPERTS, 0.2)
    return ExpertCache(LAYOUTS, slots or {HIGH: 2, LOW: 3}, policy, torch.device("cpu"), poison=True), policy


class CacheMachine(RuleBasedStateMachine):
    """Reserve, fill, fail, pin and use at random; a slot's bytes tell who filled it."""

    def __init__(self):
        super().__init__()
        self.cache, self.policy = make_cache(policy="lcu")
        self.filling, self.pins = {}, {}  # (expert, precision) -> slot; -> number of pins

    @rule(layer=st.integers(0, LAYERS - 1), expert=st.integers(0, EXPERTS - 1), precision=st.sampled_from([HIGH, LOW]))
    def ask(self, layer, expert, precision):
        key = ExpertId(layer, expert), precision
        slot = self.cache.find(*key)
        if slot is not None:
            self.cache.pin(precision, slot)
            self.pins[key] = self.pins.get(key, 0) + 1
            self.policy.use(layer, expert, precision, 1)
            assert (self.cache.pools[precision].memory[slot] == self.stamp(*key)).all()
        elif key not in self.filling:
            slot = self.cache.reserve(*key, now=layer)
            if slot is None:
                busy = sum(p is precision for _, p in [*self.filling, *self.pins])
                assert busy == len(self.cache.pools[precision])
            else:
                assert (self.cache.pools[precision].memory[slot] == 0xFF).all(), "the slot was not empty"
                assert slot not in [s for (_, p), s in self.filling.items() if p is precision], "two writers"
                self.filling[key] = slot

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), works=st.booleans())
    def finish(self, data, works):
        key = data.draw(st.sampled_from(sorted(self.filling)))
        slot = self.filling.pop(key)
        if works:
            self.cache.pools[key[1]].memory[slot] = self.stamp(*key)
            self.cache.commit(key[1], slot, pins=1)
            self.pins[key] = 1
        else:
            self.cache.abort(key[1], slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.cache.unpin(key[1], self.cache.find(*key))
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]

    @rule()
    def new_sequence(self):
        self.policy.start_sequence()

    @invariant()
    def books_agree(self):
        self.cache.check_integrity()
        for expert, precision in self.pins:
            slot = self.cache.find(expert, precision)
            assert slot is not None, "a pinned expert was evicted"
            assert (self.cache.pools[precision].memory[slot] == self.stamp(expert, precision)).all()

    @staticmethod
    def stamp(expert, precision):
        return 1 + expert.layer * 50 + expert.expert * 10 + precision


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def fill(cache, expert, precision, now=0):
    slot = cache.reserve(expert, precision, now)
    cache.commit(precision, slot)
    return slot


def test_the_policys_choice_is_evicted():
    cache, policy = make_cache()
    for e in (0, 1):
        fill(cache, ExpertId(0, e), HIGH)
        policy.use(0, e, HIGH, 1)
    policy.use(0, 0, HIGH, 1)
    fill(cache, ExpertId(0, 2), HIGH)
    assert [cache.find(ExpertId(0, e), HIGH) is not None for e in range(3)] == [True, False, True]


def test_precisions_have_their_own_slots():
    cache, _ = make_cache()
    for e in range(4):
        fill(cache, ExpertId(0, e), LOW)
    fill(cache, ExpertId(0, 0), HIGH)
    assert cache.resident_bytes() == 3 * LAYOUTS[LOW].stride + LAYOUTS[HIGH].stride


def test_slots_are_aligned_for_direct_reads():
    cache, _ = make_cache()
    for pool in cache.pools.values():
        assert pool.memory.data_ptr() % ALIGN == 0 and pool.memory.shape[1] % ALIGN == 0


def test_an_unfilled_slot_is_poisoned():
    cache, _ = make_cache()
    low, high = (LAYOUTS[p].views(cache.pools[p].memory[0]) for p in (LOW, HIGH))
    assert torch.isnan(low["up.scale"]).all() and torch.isnan(high["up.weight"]).all()


def test_integrity_check_can_fail():
    cache, _ = make_cache()
    slot = fill(cache, ExpertId(0, 0), HIGH)
    cache.pools[HIGH].owner[slot] = ExpertId(1, 1)
    with pytest.raises(AssertionError, match="two owners"):
        cache.check_integrity()
    cache, _ = make_cache()
    cache.pools[LOW].free.pop()
    with pytest.raises(AssertionError, match="a slot is lost"):
        cache.check_integrity()
