"""The quick search for a victim against the plain one, and what it asks of a policy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_engine.core.events import PassBegins, Stream, Use
from apex_engine.core.eviction import Victims, least_valued
from apex_engine.core.policies import POLICIES
from apex_engine.core.policies.base import Policy
from apex_engine.core.vocabulary import ExpertId, Geometry

LAYERS, EXPERTS = 4, 5
GEOMETRY = Geometry(LAYERS, EXPERTS, (0, 16, 100))


class Unsaid(Policy):
    """A policy that says nothing of its finalists."""

    def __init__(self, geometry):
        self.handlers = {}

    def values(self, layers, experts, precision, now):
        return ((layers * 7 + experts * 3 + now) % 11).astype(float)


def plain(policy, eligible, precision, now):
    layers, experts = np.nonzero(eligible)
    return least_valued(policy, layers, experts, precision, now)


@pytest.mark.parametrize("name", [*sorted(POLICIES), "unsaid"])
@given(st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_victim_is_the_plain_searchs(name, random):
    """Passes over all layers, uses, arrivals and pins at random: after each, at any layer, the least valued of all is found."""
    policy = (POLICIES | {"unsaid": Unsaid})[name](GEOMETRY)
    precision = random.choice((1, 2))
    victims = Victims(GEOMETRY, policy, precision)
    stream = Stream(policy, victims)
    eligible = np.zeros((LAYERS, EXPERTS), bool)
    for number in range(8):
        tokens = random.choice((1, 1, 3))
        stream.emit(PassBegins("decode", tokens, number in (0, 6)))
        for layer in range(LAYERS):
            for expert in random.sample(range(EXPERTS), 2):
                stream.emit(Use(layer, expert, random.choice((1, 2)), random.randint(1, tokens), 0.5, 0))
            for _ in range(random.randint(0, 4)):
                one = ExpertId(random.randrange(LAYERS), random.randrange(EXPERTS))
                eligible[one] = random.random() < 0.7
                victims.set(one, bool(eligible[one]))
            found, expected = victims.choose(layer), plain(policy, eligible, precision, layer)
            assert (found is None) == (expected is None)
            if found is not None:
                assert eligible[found]
                pair = policy.values(*np.array([found, expected]).T, precision, layer)
                assert pair[0] == pair[1], f"{found} is not the least valued, {expected} is"


def test_among_equals_the_first_layer_and_expert_go_whoever_came_first():
    policy = POLICIES["lru"](GEOMETRY)
    victims = Victims(GEOMETRY, policy, 2)
    for expert in (ExpertId(3, 1), ExpertId(1, 4), ExpertId(1, 2)):
        victims.set(expert, True)
    assert victims.choose(0) == ExpertId(1, 2)


@pytest.mark.parametrize("name", ["next-use", "lru", "lfu", "lfru", "lcu"])
def test_what_is_asked_about_does_not_grow_with_what_is_resident(name):
    """The policy is asked about a few twins a layer however many there are."""
    asked = []
    for experts in (8, 512):
        geometry = Geometry(6, experts, (0, 16, 100))
        policy = POLICIES[name](geometry)
        values = policy.values
        policy.values = lambda layers, *rest, values=values: (asked.append(len(layers)), values(layers, *rest))[1]
        victims = Victims(geometry, policy, 2)
        for layer in range(6):
            for expert in range(experts):
                victims.set(ExpertId(layer, expert), True)
        assert victims.choose(2) is not None
    assert asked[0] == asked[1] <= 3 * 6
