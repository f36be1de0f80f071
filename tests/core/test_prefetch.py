"""The walk over the coming layers and the governor that holds it back, on cases made by hand."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

from apex_engine.core import events
from apex_engine.core.events import Stream
from apex_engine.core.prefetch import LEAST_EARLY, Choice, Governor, Pace, Published, Trial, Wish
from apex_engine.core.rules import Rules
from apex_engine.core.thresholds import Thresholds
from apex_engine.core.vocabulary import ExpertId

LAYERS, NBYTES = 6, 1 << 20


class Memory:
    """Takes wishes; `resident` maps experts to precisions, all else is `NBYTES` to come."""

    def __init__(self, resident=(), rate=1e9):
        self.lock, self.rate, self.resident, self.wishes = nullcontext(), rate, dict(resident), []

    def best(self, expert):
        return self.resident.get(expert, 0)

    def find(self, expert, precision):
        return 0 if self.resident.get(expert) == precision else None

    def prefetch(self, wish, now):
        self.wishes.append((now, wish))
        return 0 if self.find(wish.expert, wish.precision) == 0 else NBYTES

    @property
    def twins(self):
        return [(wish.expert.layer, wish.expert.expert, wish.precision) for _, wish in self.wishes]


def choice(*gates):
    """One token's gate weights, by expert."""
    return Choice(np.array([list(gates)], np.float32), np.arange(len(gates))[None])


def walk(prefetcher, memory, now=0, predictions=None, t=(0.6, 0.9)):
    """Layers that were asked about. All choose experts 0 and 1, with these gates, unless `predictions` says otherwise."""
    rules, asked = Rules("adaptive", Thresholds((t,) * LAYERS), 2), []

    def predict(later):
        asked.append(later)
        return (predictions or {}).get(later, choice(0.5, 0.5))

    def dispatch(later, found):
        return rules.served(later, found.experts, rules.wished(later, found.gates), memory)

    prefetcher.walk(now, predict, dispatch, memory)
    return asked


def governor(depth=4, free=1.0):
    made = Governor(LAYERS, depth)
    made.pace.free = free
    return made


BOTH = pytest.mark.parametrize(
    "make", [governor, lambda depth=4: Published(LAYERS, depth)], ids=["governor", "published"]
)


@BOTH
class TestWalk:
    def test_it_stops_at_the_first_layer_where_something_is_missing(self, make):
        memory = Memory({ExpertId(1, 0): 2, ExpertId(1, 1): 2, ExpertId(2, 0): 2})
        assert walk(make(), memory) == [1, 2]
        assert memory.twins == [(1, 0, 2), (1, 1, 2), (2, 0, 2), (2, 1, 2)]

    def test_it_goes_as_far_as_its_depth_and_the_last_layer(self, make):
        memory = Memory({ExpertId(layer, e): 2 for layer in range(LAYERS) for e in range(2)})
        assert walk(make(depth=2), memory) == [1, 2]
        assert walk(make(depth=4), memory, now=3) == [4, 5]
        assert walk(make(depth=1), memory, now=-1) == [0]
        assert walk(make(depth=0), memory) == []

    def test_it_stops_where_nothing_is_known(self, make):
        memory = Memory()
        assert walk(make(), memory, predictions={1: None}) == [1]
        assert memory.wishes == []

    def test_it_wishes_for_what_the_scorer_says_and_likeliest_first(self, make):
        memory = Memory()
        walk(make(), memory, predictions={1: choice(0.1, 0.25, 0.62, 0.03)})
        # scores: .87, .62, 0, .97 (skipped)
        assert memory.twins == [(1, 2, 2), (1, 1, 1), (1, 0, 1)]

    def test_what_is_resident_is_wished_for_too_so_that_it_is_kept(self, make):
        memory = Memory({ExpertId(1, 0): 2})
        walk(make(), memory)
        assert (1, 0, 2) in memory.twins

    def test_the_layer_at_work_is_told(self, make):
        memory = Memory()
        walk(make(), memory, now=2)
        assert {now for now, _ in memory.wishes} == {2}


class TestBudget:
    def test_no_more_than_the_link_brings_in_the_free_time(self):
        four = {1: choice(0.25, 0.25, 0.25, 0.25)}
        for megabytes, wishes in ((0.5, 1), (1.5, 2), (3.5, 4)):
            memory = Memory(rate=NBYTES * megabytes)
            walk(governor(free=1.0), memory, predictions=four, t=(1.0, 1.0))
            assert len(memory.wishes) == wishes, megabytes

    def test_what_is_resident_takes_nothing_of_it(self):
        memory = Memory({ExpertId(1, 0): 2, ExpertId(1, 1): 2}, rate=NBYTES / 2)
        walk(governor(), memory, predictions={1: choice(0.3, 0.3, 0.2, 0.2)}, t=(1.0, 1.0))
        assert memory.twins == [(1, 0, 2), (1, 1, 2), (1, 2, 2)]

    def test_in_blocks_of_the_budget_one_at_a_time(self):
        memory = Memory(rate=100_000)
        walk(governor(free=1.0), memory)
        assert [wish for _, wish in memory.wishes] == [Wish(ExpertId(1, 0), 2, 100_000, alone=True)]

    def test_nothing_where_the_link_brings_less_than_a_block(self):
        memory = Memory(rate=LEAST_EARLY - 1)
        assert walk(governor(free=1.0), memory) == [] == memory.wishes
        assert walk(governor(free=1.0), Memory(rate=LEAST_EARLY)) == [1]

    def test_published_has_none(self):
        memory = Memory(rate=0.0)
        walk(Published(LAYERS, 2), memory)
        assert [wish for _, wish in memory.wishes] == [Wish(ExpertId(1, e), 2, None, alone=False) for e in range(2)]


class TestTrust:
    def judged(self, prefetcher, rounds, right):
        """`rounds` tokens at layer 1 whose choice was foreseen or not at all."""
        for _ in range(rounds):
            walk(prefetcher, Memory())
            actual = np.array([[0, 1]] if right else [[4, 5]])
            yield prefetcher.judge(1, actual, np.array([[0.5, 0.5]], np.float32))

    def test_a_layer_that_is_foreseen_badly_is_not_prefetched_until_it_is_foreseen_again(self):
        prefetcher, memory = governor(), Memory()
        # .9^6 = .53, .9^7 = .48
        assert [found.right for found in self.judged(prefetcher, 6, right=False)] == [0] * 6
        assert prefetcher.trust[1] == pytest.approx(0.9**6)
        walk(prefetcher, memory)
        assert memory.wishes
        list(self.judged(prefetcher, 1, right=False))
        memory = Memory()
        assert walk(prefetcher, memory) == [1] and not memory.wishes  # it is still asked about, and judged
        list(self.judged(prefetcher, 1, right=True))
        memory = Memory()
        walk(prefetcher, memory)
        assert memory.wishes

    def test_published_trusts_all(self):
        prefetcher, memory = Published(LAYERS, 4), Memory()
        list(self.judged(prefetcher, 20, right=False))
        walk(prefetcher, memory)
        assert memory.wishes

    def test_judging(self):
        prefetcher = governor()
        walk(prefetcher, Memory(), predictions={1: choice(0.2, 0.5, 0.3)})
        found = prefetcher.judge(1, np.array([[1, 4, 0]]), np.array([[0.6, 0.3, 0.1]], np.float32))
        assert found == events.Predicted(1, first_right=True, right=2, chosen=3)
        assert prefetcher.judge(1, np.array([[1, 4, 0]]), np.array([[0.6, 0.3, 0.1]], np.float32)) is None

    def test_what_was_expected_of_a_token_is_forgotten_at_the_next(self):
        prefetcher = governor()
        walk(prefetcher, Memory())
        Stream(prefetcher).emit(events.PassBegins("decode", 1, False))
        assert prefetcher.judge(1, np.array([[0, 1]]), np.array([[0.5, 0.5]], np.float32)) is None

    def test_only_the_next_layer_is_judged(self):
        memory = Memory({ExpertId(1, 0): 2, ExpertId(1, 1): 2})
        prefetcher = governor()
        assert walk(prefetcher, memory) == [1, 2]
        assert prefetcher.judge(2, np.array([[0, 1]]), np.array([[0.5, 0.5]], np.float32)) is None


class TestTrial:
    @pytest.mark.parametrize(("with_it", "pays"), [(0.8, True), (1.2, False)])
    def test_looking_ahead_goes_on_only_where_it_pays(self, with_it, pays):
        """Whatever bytes a token misses, here up to five times what there is to gain, and however busy the machine becomes."""
        trial, on, demanded, draw = Trial(), [], 0, random.Random(0)
        for token in range(160):
            trial.begin(demanded)
            on.append(trial.on)
            missing = draw.randrange(1000)
            demanded += missing
            compute = (with_it if trial.on else 1.0) * (1.5 if token >= 90 else 1.0)
            trial.end(compute + missing / 1000, demanded, 1000.0)
        assert on[:16].count(True) == 8
        assert on[32:].count(pays) == 120  # and one token in sixteen tries the other way

    def test_the_governor_looks_ahead_only_while_the_trial_says_so(self):
        prefetcher = governor()
        stream, said = Stream(prefetcher), []
        for _ in range(4):
            stream.emit(events.PassBegins("decode", 1, False))
            said.append(prefetcher.trial.on)
            assert bool(walk(prefetcher, Memory())) == said[-1]
            stream.emit(events.PassEnds("decode", 1, 1.0, 1e6))
        assert set(said) == {True, False}
        stream.emit(events.PassBegins("prefill", 9, False))
        assert walk(prefetcher, Memory())

    def test_bytes_that_were_demanded_count_whoever_brought_them(self):
        """A prefetched twin that is used has taken the link's time as much as one that was waited for."""
        prefetcher, seen = governor(), []
        prefetcher.trial.begin = seen.append
        stream = Stream(prefetcher)
        expert = ExpertId(1, 0)
        stream.emit(events.Moved(expert, 2, 100, early=False, asked=True, seconds=0.1))  # a demand's
        stream.emit(events.Moved(expert, 2, 1000, early=True, asked=False, seconds=0.1))  # a prefetch's
        stream.emit(events.PassBegins("decode", 1, False))
        stream.emit(events.Asked(expert, 2, True, True, 1000))  # which is used
        stream.emit(events.PassBegins("decode", 1, False))
        stream.emit(
            events.Moved(expert, 2, 10_000, early=True, asked=True, seconds=0.1)
        )  # begun early, wanted meanwhile
        stream.emit(events.PassBegins("decode", 1, False))
        assert seen == [100, 1100, 11_100]


def test_pace_is_the_time_between_steps_that_nobody_waited():
    pace = Pace()
    pace.begin()
    for now in (1.0, 2.0, 3.0):
        pace.step(now)
        pace.stall += 0.6
    assert pace.free == pytest.approx(0.04 + 0.1 * (0.4 - 0.04))
    pace.begin()
    pace.step(100.0)  # what happens between two passes does not count
    assert pace.free == pytest.approx(0.076)


def test_the_governor_paces_itself_by_events():
    prefetcher = Governor(LAYERS, 1)
    stream = Stream(prefetcher)
    stream.emit(events.PassBegins("decode", 1, False))
    for now in (1.0, 2.0):
        stream.emit(events.StepBegins(0, now))
        stream.emit(events.Waited(0.25, 0.25))
    assert prefetcher.pace.free == pytest.approx(0.1 * 0.75)
