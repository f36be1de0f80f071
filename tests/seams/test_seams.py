"""One contract a seam, which every implementation of it passes."""

import numpy as np
import pytest
import torch
from plain_tier import PlainTier

import apex_engine
from apex_engine.core import events
from apex_engine.core.events import Sink, Stream
from apex_engine.core.eviction import Victims
from apex_engine.core.ledger import Ledger
from apex_engine.core.policies import POLICIES
from apex_engine.core.prefetch import Governor, Published, Wish
from apex_engine.core.vocabulary import ExpertId, Geometry, Words
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.copies import Carrier
from apex_engine.memory.host import HostCache
from apex_engine.memory.link import Link
from apex_engine.memory.loader import Loader
from apex_engine.predict import PREDICTORS
from apex_engine.predict.base import EMBEDDING
from apex_engine.runtime import build

CPU, LAYERS, EXPERTS = torch.device("cpu"), 3, 4
SHAPE = ExpertShape(64, 64, True)
# Three twins: nothing of a seam knows that there are two.
FORMS = {1: MatrixFormat("int2", 64), 2: MatrixFormat("int4", 64), 3: MatrixFormat("bfloat16")}
LAYOUTS = {p: Layout(SHAPE, form, form) for p, form in FORMS.items()}
GEOMETRY = Geometry(LAYERS, EXPERTS, (0, *(LAYOUTS[p].stride for p in (1, 2, 3))))
WORDS = Words.of(["int2", "int4", "bfloat16"])
SLOTS = {1: 2, 2: 3, 3: 4}


def stamp(expert, precision):
    return 1 + expert.layer * 40 + expert.expert * 8 + precision


class Source:
    """Blobs full of their stamp; those of `broken` experts cannot be read."""

    def __init__(self):
        self.broken, self.reads = set(), []

    def read(self, expert, precision, part, start=0):
        self.reads.append((expert, precision))
        if expert in self.broken:
            raise ApexError(f"{expert} cannot be read")
        part[:] = stamp(expert, precision)

    def verify(self, expert, precision, blob):
        assert (blob == stamp(expert, precision)).all()


def tiers(kind, source):
    policy, ledger = POLICIES["lru"](GEOMETRY), Ledger(WORDS)
    stream = Stream(policy, ledger)
    cache = ExpertCache(GEOMETRY, LAYOUTS, SLOTS, policy, CPU, poison=True, stream=stream)
    if kind == "plain":
        return PlainTier(cache, source, stream), ledger
    host = HostCache(GEOMETRY, LAYOUTS, dict.fromkeys(SLOTS, 5), poison=True) if "host" in kind else None
    link = Link(1e9, 1e-5) if "link" in kind else None
    workers = 0 if kind == "caller alone" else 4
    return Loader(cache, Carrier(source, cache, CPU, link, host), stream, host, workers), ledger


@pytest.fixture(params=["plain", "loader", "caller alone", "host and link"])
def made(request):
    source = Source()
    tier, ledger = tiers(request.param, source)
    yield tier, source, ledger
    tier.close()


class TestTier:
    def ask(self, tier, *experts, precision=3):
        with tier.lock:
            tickets = [tier.request(expert, precision, expert.layer) for expert in experts]
            tier.settle([ticket for ticket in tickets if not ticket.over], busy=False)
            tier.drop(experts[0].layer)
        return tickets

    def take(self, tier, tickets):
        """Wait for all, and check what is in their slots."""
        left = [ticket for ticket in tickets if not ticket.over]
        while left:
            tier.arrived(left)
        for ticket in tickets:
            blob = tier.residency.pools[ticket.precision].bytes[ticket.slot]
            assert (blob == stamp(ticket.expert, ticket.precision)).all()
        return [(ticket.precision, ticket.slot) for ticket in tickets]

    @pytest.mark.parametrize("precision", [1, 2, 3])
    def test_a_ticket_is_a_slot_with_the_twin_in_it_pinned_until_it_is_released(self, made, precision):
        tier, _, ledger = made
        for layer in range(LAYERS):
            for e in range(EXPERTS):
                slots = self.take(tier, self.ask(tier, ExpertId(layer, e), precision=precision))
                assert tier.residency.pools[precision].pins[slots[0][1]] == 1
                tier.release(slots)
        tier.residency.check_integrity()
        assert not tier.residency.pools[precision].pins.any()
        assert ledger.loads[precision] == LAYERS * EXPERTS

    def test_what_is_resident_is_there_at_once_and_is_a_hit(self, made):
        tier, source, ledger = made
        tier.release(self.take(tier, self.ask(tier, ExpertId(0, 1))))
        reads = len(source.reads)
        (ticket,) = self.ask(tier, ExpertId(0, 1))
        assert ticket.over and ticket.error is None and len(source.reads) == reads
        assert ledger.hits[3] == 1 == ledger.loads[3]
        tier.release([(3, ticket.slot)])

    def test_two_who_ask_share_one_load(self, made):
        tier, source, _ = made
        one, other = self.ask(tier, ExpertId(0, 1), ExpertId(0, 1), precision=1)
        slots = self.take(tier, [one, other])
        assert slots[0] == slots[1] and source.reads.count((ExpertId(0, 1), 1)) == 1
        tier.release(slots)

    def test_a_failed_read_reaches_who_waits_and_frees_the_slot(self, made):
        tier, source, _ = made
        source.broken.add(ExpertId(1, 2))
        tickets = self.ask(tier, ExpertId(1, 2))
        with pytest.raises(ApexError, match="cannot be read"):
            tier.arrived(tickets)
        assert tier.residency.find(ExpertId(1, 2), 3) is None
        source.broken.clear()
        tier.release(self.take(tier, self.ask(tier, ExpertId(1, 2))))
        tier.residency.check_integrity()

    def test_who_does_not_wait_leaves_no_pin(self, made):
        tier, _, _ = made
        tickets = self.ask(tier, ExpertId(0, 0), ExpertId(0, 1))
        tier.forget(tickets)
        for e in range(EXPERTS):
            tier.release(self.take(tier, self.ask(tier, ExpertId(2, e))))
        assert not tier.residency.pools[3].pins.any()

    def test_a_wish_for_what_is_resident_keeps_it_and_misses_nothing(self, made):
        tier, _, _ = made
        tier.release(self.take(tier, self.ask(tier, ExpertId(1, 0))))
        with tier.lock:
            assert tier.prefetch(Wish(ExpertId(1, 0), 3), 0) == 0
            assert tier.prefetch(Wish(ExpertId(1, 1), 3), 0) > 0

    def test_evicting_leaves_what_is_pinned(self, made):
        tier, _, _ = made
        kept = self.take(tier, self.ask(tier, ExpertId(0, 0)))
        tier.release(self.take(tier, self.ask(tier, ExpertId(0, 1))))
        with tier.lock:
            tier.evict_all([1, 2, 3])
        assert tier.residency.find(ExpertId(0, 0), 3) is not None and tier.residency.find(ExpertId(0, 1), 3) is None
        tier.release(kept)


class TestResidency:
    @pytest.fixture(params=["device", "host"])
    def cache(self, request):
        if request.param == "host":
            return HostCache(GEOMETRY, LAYOUTS, SLOTS)
        return ExpertCache(GEOMETRY, LAYOUTS, SLOTS, POLICIES["lfu"](GEOMETRY), CPU)

    def test_best_is_the_highest_that_is_found(self, cache):
        expert = ExpertId(1, 2)
        assert cache.best(expert) == 0
        for precision in (2, 1, 3):
            slot = cache.reserve(expert, precision, 0)
            assert cache.find(expert, precision) is None  # not before it is filled
            cache.commit(precision, slot)
            assert cache.find(expert, precision) == slot
            assert cache.best(expert) == max(p for p in (1, 2, 3) if cache.find(expert, p) is not None)
        cache.evict(3)
        assert cache.best(expert) == 2


EVENTS = [
    events.PassBegins("prefill", 2, True),
    events.PassBegins("decode", 1, False),
    events.StepBegins(1, 2.5),
    events.Routed(1, np.array([[0, 1]]), np.array([[0.6, 0.4]], np.float32), np.array([[3, 0]], np.int8)),
    events.Use(1, 0, 3, 1, 0.6, 0),
    events.Use(1, 1, 0, 1, 0.4, 0),
    events.Asked(ExpertId(1, 0), 3, False, True, 10),
    events.Moved(ExpertId(1, 0), 3, 64, True, False, 0.1),
    events.Loaded(ExpertId(1, 0), 3, True),
    events.Evicted(ExpertId(1, 3), 2),
    events.PrefetchFailed(ExpertId(1, 3), 2),
    events.Predicted(1, True, 1, 2),
    events.Waited(0.2, 0.1),
    events.Computed(0.1),
    events.PassEnds("decode", 1, 0.5, 1e6),
]
SINKS = {
    "ledger": lambda: Ledger(WORDS),
    "governor": lambda: Governor(LAYERS, 2),
    "published": lambda: Published(LAYERS, 2),
    "victims": lambda: Victims(GEOMETRY, POLICIES["lru"](GEOMETRY), 2),
    **{f"policy {name}": (lambda made=made: made(GEOMETRY)) for name, made in POLICIES.items()},
}


class TestSink:
    @pytest.mark.parametrize("name", SINKS)
    def test_it_hears_whole_tokens_and_answers_nothing(self, name):
        sink: Sink = SINKS[name]()
        before, stream = dict(sink.handlers), Stream(sink)
        for _ in range(3):
            for event in EVENTS:
                assert stream.emit(event) is None
        assert dict(sink.handlers) == before and set(before) <= {type(event) for event in EVENTS}

    def test_a_stream_tells_its_sinks_in_their_order_until_they_are_removed(self):
        heard = []

        class Ear:
            def __init__(self, name):
                self.handlers = {events.Waited: lambda event: heard.append((name, event.seconds))}

        first, second = Ear("first"), Ear("second")
        stream = Stream(first, second)
        stream.emit(events.Waited(1.0, 0.5))
        stream.emit(events.Computed(1.0))
        stream.remove(first)
        stream.emit(events.Waited(2.0, 0.5))
        assert heard == [("first", 1.0), ("second", 1.0), ("second", 2.0)]
        assert stream.wants(events.Waited) and not stream.wants(events.Computed)

    def test_every_event_is_frozen(self):
        for event in EVENTS:
            with pytest.raises(AttributeError):
                setattr(event, event._fields[0], None)


class TestPredictor:
    @pytest.mark.parametrize("kind", PREDICTORS)
    def test_it_is_asked_shown_and_learns_without_changing_the_model(self, tiny, kind):
        model = apex_engine.load(tiny()[1], dtype=torch.float32, memory="60%", predictor=kind)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        predictor, ids = model.apex.predictor, torch.randint(2, 128, (1, 5))
        assert not predictor.ready
        model(ids)
        assert predictor.ready and list(predictor.unknown) == []
        for tokens in (1, 3):
            x = torch.randn(tokens, 64)
            for now, later in ((EMBEDDING, 0), (0, 1), (0, 0)):
                choice = predictor.predict(now, later, x)
                assert choice.gates.shape == choice.experts.shape == (tokens, 2)
                assert ((choice.experts >= 0) & (choice.experts < 6)).all() and np.isfinite(choice.gates).all()
        predictor.observe(1, torch.randn(1, 64))
        predictor.learn()
        predictor.learn()  # nothing is left
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_engine_runs_on_the_plain_tier_to_the_same_tokens(tiny, monkeypatch):
    """Nothing but the seam is used of the loader."""
    ids, found = torch.randint(2, 128, (1, 9)), []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(build, "Carrier", lambda source, *rest: source)
            monkeypatch.setattr(build, "Loader", lambda cache, source, stream, host: PlainTier(cache, source, stream))
        model = apex_engine.load(tiny()[1], dtype=torch.float32, mode="deterministic", memory="40%")
        found.append(model.generate(ids, max_new_tokens=6, do_sample=False))
        model.apex.check_integrity()
    assert torch.equal(*found)
