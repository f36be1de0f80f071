import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from apex_engine.core.events import PassBegins, Stream, Use
from apex_engine.core.policies import POLICIES
from apex_engine.core.vocabulary import ExpertId, Geometry
from apex_engine.kernels.layout import ALIGN, ExpertShape, Layout, MatrixFormat
from apex_engine.memory.cache import ExpertCache

HIGH, LOW = 2, 1
SHAPE = ExpertShape(8, 8, False)
LAYOUTS = {
    HIGH: Layout(SHAPE, MatrixFormat("bfloat16"), MatrixFormat("bfloat16")),
    LOW: Layout(SHAPE, MatrixFormat("int2", 8), MatrixFormat("int2", 8)),
}
LAYERS, EXPERTS = 3, 4


GEOMETRY = Geometry(LAYERS, EXPERTS, (0, *(LAYOUTS[p].stride for p in (LOW, HIGH))))


class Told:
    """A policy's ear."""

    def __init__(self, stream):
        self.emit = stream.emit

    def use(self, layer, expert, precision, count):
        self.emit(Use(layer, expert, precision, count, 0.5, 0))

    def start_pass(self, tokens, new_sequence=False):
        self.emit(PassBegins("decode", tokens, new_sequence))


def make_cache(slots=None, policy="lru"):
    policy = POLICIES[policy](GEOMETRY)
    stream = Stream(policy)
    cache = ExpertCache(
        GEOMETRY, LAYOUTS, slots or {HIGH: 2, LOW: 3}, policy, torch.device("cpu"), poison=True, stream=stream
    )
    return cache, Told(stream)


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
        self.policy.start_pass(1, new_sequence=True)

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


class TestStreaming:
    """A prompt of three layers of four experts goes through eight slots: two for each layer, and two that are passed through."""

    def stream(self, cache, layer):
        for e in range(EXPERTS):
            if cache.find(ExpertId(layer, e), HIGH) is None:
                slot = cache.reserve(ExpertId(layer, e), HIGH, layer, share=2)
                cache.commit(HIGH, slot)

    def test_free_slots_are_shared_by_the_layers(self):
        cache, _ = make_cache({HIGH: 8})
        for layer in range(LAYERS):
            self.stream(cache, layer)
        kept = [
            sum(cache.find(ExpertId(layer, e), HIGH) is not None for e in range(EXPERTS)) for layer in range(LAYERS)
        ]
        assert sum(kept) >= 7 and min(kept) >= 2

    def test_what_decoding_left_stays_but_for_the_slots_passed_through(self):
        cache, policy = make_cache({HIGH: 8}, "lcu")
        left = [ExpertId(layer, e) for layer in range(2) for e in range(EXPERTS)]
        for expert in left:
            fill(cache, expert, HIGH, expert.layer)
        policy.start_pass(100)
        for layer in range(LAYERS):
            self.stream(cache, layer)
            cache.check_integrity()
        stays = sum(cache.find(expert, HIGH) is not None for expert in left)
        assert cache.pools[HIGH].most_passing == 2 and stays >= 6
        passing = int(cache.pools[HIGH].passing.sum())
        cache.end_streaming()
        cache.check_integrity()
        assert not cache.pools[HIGH].passing.any() and len(cache.pools[HIGH].free) == passing > 0

    def test_what_the_prompt_uses_more_takes_the_place_of_what_it_uses_less_in_that_layer(self):
        cache, policy = make_cache({HIGH: 8}, "lfu")
        for expert in [*(ExpertId(0, e) for e in range(4)), *(ExpertId(1, e) for e in range(3)), ExpertId(2, 0)]:
            fill(cache, expert, HIGH, expert.layer)
        for e, count in enumerate((1, 0, 2, 2)):
            policy.use(1, e, HIGH, count)
        least = cache.find(ExpertId(1, 1), HIGH)
        assert cache.reserve(ExpertId(1, 3), HIGH, 1, share=2) == least
        assert not cache.pools[HIGH].passing.any()

    def test_nothing_is_handed_out_while_all_that_pass_are_at_work(self):
        cache, _ = make_cache({HIGH: 8})
        for layer in range(2):
            for e in range(EXPERTS):
                fill(cache, ExpertId(layer, e), HIGH, layer)
        slots = [cache.reserve(ExpertId(2, e), HIGH, 2, share=2) for e in range(2)]
        assert None not in slots
        assert cache.reserve(ExpertId(2, 2), HIGH, 2, share=2) is None
        cache.commit(HIGH, slots[0])
        assert cache.reserve(ExpertId(2, 2), HIGH, 2, share=2) == slots[0]


class TestMask:
    def test_a_masked_twin_makes_room_for_a_demand_only_and_after_all_others(self):
        cache, policy = make_cache({HIGH: 2})
        for e in range(2):
            fill(cache, ExpertId(1, e), HIGH)
        policy.use(1, 0, HIGH, 1)
        policy.use(1, 1, HIGH, 1)
        cache.mask(ExpertId(1, 0), HIGH)  # the policy's choice
        slot = cache.reserve(ExpertId(0, 0), HIGH, 0, demand=False)
        assert cache.find(ExpertId(1, 0), HIGH) is not None and cache.find(ExpertId(1, 1), HIGH) is None
        assert cache.reserve(ExpertId(0, 1), HIGH, 0, demand=False) is None
        assert cache.reserve(ExpertId(0, 1), HIGH, 0, demand=True) is not None
        cache.commit(HIGH, slot)
        cache.check_integrity()

    def test_until_its_layer_has_passed(self):
        cache, _ = make_cache({HIGH: 2})
        fill(cache, ExpertId(1, 0), HIGH)
        cache.mask(ExpertId(1, 0), HIGH)
        cache.unmask(0)
        assert cache.pools[HIGH].masked.any()
        cache.unmask(1)
        assert not cache.pools[HIGH].masked.any()
