"""The loader against a store of its own making: right bytes, one load a twin, demands first, and nothing lost when reads fail."""

import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_engine.core.events import Stream
from apex_engine.core.ledger import Ledger
from apex_engine.core.policies import POLICIES
from apex_engine.core.prefetch import LEAST_EARLY, Wish
from apex_engine.core.vocabulary import ExpertId, Geometry, Words
from apex_engine.errors import ApexError
from apex_engine.kernels.layout import ExpertShape, Layout, MatrixFormat
from apex_engine.memory.cache import ExpertCache
from apex_engine.memory.copies import Carrier
from apex_engine.memory.host import HostCache
from apex_engine.memory.link import Link
from apex_engine.memory.loader import Loader
from apex_engine.memory.requests import LEAST_BLOCK

HIGH, LOW = 2, 1
SHAPE = ExpertShape(256, 384, True)  # HIGH in several blocks, LOW in one
LAYOUTS = {
    HIGH: Layout(SHAPE, MatrixFormat("bfloat16"), MatrixFormat("bfloat16")),
    LOW: Layout(SHAPE, MatrixFormat("int2", 64), MatrixFormat("int2", 64)),
}
LAYERS, EXPERTS = 4, 8
GEOMETRY = Geometry(LAYERS, EXPERTS, (0, *(LAYOUTS[p].stride for p in (LOW, HIGH))))
BLOCKS = -(-LAYOUTS[HIGH].stride // LEAST_BLOCK)  # of a demand


def stamp(expert, precision):
    return 1 + expert.layer * 20 + expert.expert * 2 + (precision is HIGH)


class Store:
    """Blobs full of their stamp. `trouble(expert, precision, start)` may sleep or raise."""

    def __init__(self, trouble=lambda *block: None):
        self.trouble, self.blocks, self.lock = trouble, [], threading.Lock()

    def read(self, expert, precision, part, start=0):
        with self.lock:
            self.blocks.append((expert, precision, start))
        part[: len(part) // 2] = stamp(expert, precision)
        self.trouble(expert, precision, start)
        part[len(part) // 2 :] = stamp(expert, precision)

    def verify(self, expert, precision, blob):
        if not (blob == stamp(expert, precision)).all():
            raise ApexError(f"{expert} {precision} came wrong")


def a_gated_store():
    """A store whose reads wait for `gate`; `running` tells that one has begun."""
    running, gate = threading.Event(), threading.Event()

    def trouble(expert, precision, start):
        running.set()
        assert gate.wait(20)

    return Store(trouble), running, gate


@pytest.fixture
def make():
    made = []

    def make(slots=None, policy="lru", store=None, **options):
        loader = a_loader(slots or {HIGH: 3, LOW: 3}, policy, store or Store(), **options)
        made.append(loader)
        return loader, loader.residency

    yield make
    for loader in made:
        loader.close()


def a_loader(slots, policy, store, link=None, host=None, **options):
    """A loader, with a `ledger` that hears its events and the `store` it reads from."""
    policy, ledger = POLICIES[policy](GEOMETRY), Ledger(Words.of(["int2", "bfloat16"]))
    stream = Stream(policy, ledger)
    cache = ExpertCache(GEOMETRY, LAYOUTS, slots, policy, torch.device("cpu"), poison=True, stream=stream)
    loader = Loader(cache, Carrier(store, cache, torch.device("cpu"), link, host), stream, host, **options)
    loader.ledger, loader.store = ledger, store
    return loader


def a_host(slots):
    return HostCache(GEOMETRY, LAYOUTS, {HIGH: slots, LOW: slots}, poison=True)


def request(loader, expert, precision=HIGH, busy=False, **options):
    with loader.lock:
        ticket = loader.request(expert, precision, expert.layer, **options)
        loader.settle([ticket], busy)
        return ticket


def prefetch(loader, expert, precision=HIGH):
    with loader.lock:
        return loader.prefetch(Wish(expert, precision, LEAST_EARLY, alone=True), 0)


def fetch(loader, expert, precision=HIGH):
    """The twin's slot, pinned."""
    return loader.arrived([request(loader, expert, precision)])[0].slot


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


@pytest.mark.parametrize("host", [0, 4, 32], ids=["no host tier", "a host cache", "a host tier with room for all"])
@pytest.mark.parametrize("link", [None, Link(1e9, 1e-5)], ids=["", "link"])
def test_every_twin_arrives_whole(make, host, link):
    tier = a_host(host) if host else None
    loader, cache = make(link=link, host=tier)
    misses = 0
    for _ in range(2):
        for layer in range(LAYERS):
            for e in range(EXPERTS):
                for precision in (HIGH, LOW):
                    expert = ExpertId(layer, e)
                    misses += cache.find(expert, precision) is None
                    slot = fetch(loader, expert, precision)
                    assert (cache.pools[precision].memory[slot] == stamp(expert, precision)).all()
                    assert cache.pools[precision].pins[slot] == 1
                    loader.release([(precision, slot)])
    loads, nbytes = loader.ledger.loads, loader.ledger.bytes_read
    assert sum(loads) == misses
    assert all(nbytes[precision] == loads[precision] * LAYOUTS[precision].stride for precision in (HIGH, LOW))
    cache.check_integrity()
    if tier:
        tier.check_integrity()
        whole = LAYERS * EXPERTS * (BLOCKS + 1)
        assert len(loader.store.blocks) == whole if host == 32 else whole < len(loader.store.blocks) <= 2 * whole
        assert not any(pool.pins.any() for pool in tier.pools.values())


def test_one_load_however_many_ask(make):
    store = Store(lambda *block: time.sleep(0.01))
    loader, cache = make(store=store)
    expert = ExpertId(0, 0)
    prefetch(loader, expert)
    loads = [request(loader, expert) for _ in range(3)]
    assert loads[0] is loads[1] is loads[2]
    for load in loads:
        assert loader.arrived([load]) == [load]
    assert len({start for _, _, start in store.blocks}) == len(store.blocks)
    assert loader.ledger.bytes_read[HIGH] == LAYOUTS[HIGH].stride and cache.pools[HIGH].pins[loads[0].slot] == 3
    loader.release([(HIGH, loads[0].slot)] * 3)
    cache.check_integrity()


@pytest.mark.parametrize("host", [0, 4])
def test_a_failed_read_frees_its_slot_and_the_loader_stays_usable(make, host):
    def trouble(expert, precision, start):
        if broken and start:
            raise ApexError(f"layer {expert.layer}, expert {expert.expert}: the cable is out")

    broken, tier = True, a_host(host) if host else None
    loader, cache = make(store=Store(trouble), host=tier)
    with pytest.raises(ApexError, match="layer 0, expert 0: the cable is out"):
        fetch(loader, ExpertId(0, 0))
    with loader.lock:
        cache.check_integrity()
    assert cache.resident_bytes() == 0 and loader.ledger.loads[HIGH] == 0
    broken = False
    assert (cache.pools[HIGH].memory[fetch(loader, ExpertId(0, 0))] == stamp(ExpertId(0, 0), HIGH)).all()
    if tier:
        tier.check_integrity()


def test_wrong_bytes_do_not_become_resident(make):
    store = Store()
    store.verify = lambda *args: (_ for _ in ()).throw(ApexError("wrong checksum"))
    loader, cache = make(store=store)
    with pytest.raises(ApexError, match="wrong checksum"):
        fetch(loader, ExpertId(1, 1), LOW)
    assert cache.resident_bytes() == 0


def test_a_failed_prefetch_is_counted_and_tried_again_when_needed(make):
    def trouble(*block):
        if broken:
            raise ApexError("no")

    broken = True
    loader, cache = make(store=Store(trouble))
    prefetch(loader, ExpertId(0, 0))
    until(lambda: loader.ledger.failed_prefetches)
    broken = False
    fetch(loader, ExpertId(0, 0))
    cache.check_integrity()


def test_a_prefetch_that_is_used(make):
    loader, _ = make()
    expert = ExpertId(2, 3)
    assert prefetch(loader, expert) == LAYOUTS[HIGH].stride
    until(lambda: not loader.outstanding())
    assert prefetch(loader, expert) == 0
    assert request(loader, expert).over
    ledger = loader.ledger
    assert ledger.prefetched_bytes == ledger.useful_bytes == LAYOUTS[HIGH].stride
    assert (ledger.missing, ledger.foreseen, ledger.loads[HIGH]) == (1, 1, 0)


def test_a_demand_overtakes_a_prefetch_at_the_next_block(make):
    """One worker, so that the order is that of the queue."""
    store, running, gate = a_gated_store()
    loader, cache = make(store=store, workers=1)
    early, urgent = ExpertId(1, 0), ExpertId(0, 0)
    prefetch(loader, early)
    assert running.wait(20)
    load = request(loader, urgent)
    gate.set()
    until(lambda: load.over)
    assert [expert for expert, _, _ in store.blocks[: 1 + BLOCKS]] == [early] + [urgent] * BLOCKS
    until(lambda: not loader.outstanding())
    assert cache.find(early, HIGH) is not None


def test_what_was_fetched_for_a_layer_in_vain_is_dropped(make):
    store, running, gate = a_gated_store()
    loader, cache = make(store=store, workers=1)
    for e in range(3):
        prefetch(loader, ExpertId(1, e))
    prefetch(loader, ExpertId(2, 0))
    assert running.wait(20)
    with loader.lock:
        loader.drop(1)
    gate.set()
    until(lambda: not loader.outstanding())
    assert {expert.layer for expert, _, start in store.blocks if start} == {2}
    assert cache.resident_bytes() == LAYOUTS[HIGH].stride
    cache.check_integrity()


def test_a_dropped_prefetch_that_is_wanted_after_all(make):
    store, running, gate = a_gated_store()
    loader, cache = make(store=store, workers=1)
    prefetch(loader, ExpertId(1, 0))
    assert running.wait(20)
    with loader.lock:
        loader.drop(1)
    load = request(loader, ExpertId(1, 0))
    gate.set()
    (there,) = loader.arrived([load])
    assert [start for _, _, start in store.blocks] == [0, *range(LEAST_EARLY, LAYOUTS[HIGH].stride, LEAST_BLOCK)]
    assert (cache.pools[HIGH].memory[there.slot] == stamp(ExpertId(1, 0), HIGH)).all()


@pytest.mark.parametrize("slots", [1, 2])
def test_a_demand_gets_a_slot_that_prefetches_hold(make, slots):
    loader, cache = make(slots={HIGH: slots}, workers=1)
    for e in range(slots):
        prefetch(loader, ExpertId(2, e))
    until(lambda: not loader.outstanding())
    assert cache.pools[HIGH].masked.all()
    for e in range(4):
        slot = fetch(loader, ExpertId(0, e))
        loader.release([(HIGH, slot)])
    with loader.lock:
        cache.check_integrity()


def test_more_demands_than_slots_go_in_turns(make):
    loader, cache = make(slots={HIGH: 2})
    with loader.lock:
        coming = [loader.request(ExpertId(0, e), HIGH, 0) for e in range(EXPERTS)]
        loader.settle(coming, busy=False)
    seen = set()
    while coming:
        for load in loader.arrived(coming):
            assert (cache.pools[HIGH].memory[load.slot] == stamp(load.expert, HIGH)).all()
            seen.add(load.expert.expert)
            loader.release([(HIGH, load.slot)])
    assert seen == set(range(EXPERTS))


def test_closing_wakes_who_waits_and_ends_the_threads(make):
    def workers():
        return {thread for thread in threading.enumerate() if thread.name.startswith("apex-loader")}

    gate, before = threading.Event(), workers()
    loader, cache = make(store=Store(lambda *block: gate.wait(20)), slots={HIGH: 1})
    errors = []

    def wait(e):
        try:
            fetch(loader, ExpertId(0, e))
        except ApexError as error:
            errors.append(str(error))

    waiting = [threading.Thread(target=wait, args=(e,)) for e in range(2)]
    for thread in waiting:
        thread.start()
    until(lambda: loader.outstanding() == 2)
    threading.Timer(0.05, gate.set).start()
    loader.close()
    for thread in waiting:
        thread.join(20)
    assert len(errors) >= 1 and all("closed" in error for error in errors)
    assert workers() == before
    with pytest.raises(ApexError, match="closed"):
        fetch(loader, ExpertId(1, 1))
    cache.check_integrity()


def in_main_thread():
    return threading.current_thread() is threading.main_thread()


class TestInterrupts:
    """Ctrl-C reaches the thread that asks: what it was bringing itself is brought by others, and nothing stays in the books."""

    @pytest.mark.parametrize("host", [0, 4])
    def test_while_a_block_is_read(self, make, host):
        def trouble(*block):
            if in_main_thread() and pressed.pop():
                raise KeyboardInterrupt

        pressed, tier = [False] * 9 + [True], a_host(host) if host else None
        loader, cache = make(store=Store(trouble), host=tier, workers=0)  # nobody else brings it
        ticket = request(loader, ExpertId(0, 0))
        with pytest.raises(KeyboardInterrupt):
            loader.arrived([ticket])
        loader.forget([ticket])
        loader.recover()
        with loader.lock:
            cache.check_integrity()
        slot = fetch(loader, ExpertId(0, 0))
        assert (cache.pools[HIGH].memory[slot] == stamp(ExpertId(0, 0), HIGH)).all()
        loader.release([(HIGH, slot)])
        cache.check_integrity()
        assert not loader.outstanding() and not cache.pools[HIGH].pins.any()
        if tier:
            tier.check_integrity()

    def test_while_the_link_is_waited_for(self, make):
        class Cable:
            def transfer(self, nbytes):
                if in_main_thread() and pressed:
                    raise KeyboardInterrupt

        pressed = [True]
        loader, cache = make(link=Cable())
        ticket = request(loader, ExpertId(0, 0), LOW)
        with pytest.raises(KeyboardInterrupt):
            while True:  # a worker may have been faster
                loader.arrived([ticket])
                loader.release([(LOW, ticket.slot)])
                ticket = request(loader, ExpertId(0, (ticket.expert.expert + 1) % EXPERTS), LOW)
        loader.forget([ticket])
        pressed.clear()
        slot = fetch(loader, ticket.expert, LOW)
        assert (cache.pools[LOW].memory[slot] == stamp(ticket.expert, LOW)).all()

    def test_another_who_waits_for_it_gets_it(self, make):
        """One thread is stopped in the middle of a block, the other has asked for the same twin."""

        def trouble(*block):
            if in_main_thread() and pressed:
                pressed.clear()
                raise KeyboardInterrupt

        pressed, found = [True], []
        loader, cache = make(store=Store(trouble), workers=0)
        ticket = request(loader, ExpertId(0, 0))
        other = threading.Thread(target=lambda: found.append(fetch(loader, ExpertId(0, 0))))
        with pytest.raises(KeyboardInterrupt):
            loader.arrived([ticket])
        other.start()
        other.join(20)
        assert (cache.pools[HIGH].memory[found[0]] == stamp(ExpertId(0, 0), HIGH)).all()

    def test_while_the_checksum_is_compared(self, make):
        store, pressed = Store(), [True]
        verify = store.verify

        def interrupted(*args):
            if in_main_thread() and pressed:
                pressed.clear()
                raise KeyboardInterrupt
            verify(*args)

        store.verify = interrupted
        loader, cache = make(store=store, workers=0)
        ticket = request(loader, ExpertId(0, 0), LOW)
        with pytest.raises(KeyboardInterrupt):
            loader.arrived([ticket])
        loader.forget([ticket])
        assert (cache.pools[LOW].memory[fetch(loader, ExpertId(0, 0), LOW)] == stamp(ExpertId(0, 0), LOW)).all()


def test_a_dropped_prefetch_that_is_expected_again_comes(make):
    """Its block is on its way when its layer passes, and again when the next token wants it."""
    store, running, gate = a_gated_store()
    loader, cache = make(store=store, workers=1)
    expert = ExpertId(1, 0)
    prefetch(loader, expert)
    assert running.wait(20)
    with loader.lock:
        loader.drop(1)
    assert prefetch(loader, expert) > 0  # bytes that are still to come, and do
    gate.set()
    until(lambda: not loader.outstanding())
    assert cache.find(expert, HIGH) is not None
    cache.check_integrity()


def test_a_lone_demand_of_one_block_is_begun_while_the_caller_is_busy(make):
    loader, cache = make()
    ticket = request(loader, ExpertId(0, 0), LOW, busy=True)
    until(lambda: ticket.over)  # and nobody has waited for it
    assert (cache.pools[LOW].memory[ticket.slot] == stamp(ExpertId(0, 0), LOW)).all()


class TestUpgrades:
    def begun(self, make):
        """An upgrade of layer 1 whose first block is on its way, and another that is not begun."""
        store, running, gate = a_gated_store()
        loader, cache = make(store=store, workers=1)
        with loader.lock:
            for e in range(2):
                loader.upgrade(ExpertId(1, e), HIGH, 1)
        assert running.wait(20)
        return loader, cache, gate

    def test_one_that_is_begun_goes_on_over_tokens(self, make):
        loader, cache, gate = self.begun(make)
        with loader.lock:
            loader.drop(1)
            loader.drop_all()
        gate.set()
        until(lambda: not loader.outstanding())
        assert cache.find(ExpertId(1, 0), HIGH) is not None and cache.find(ExpertId(1, 1), HIGH) is None

    def test_a_demand_that_finds_no_other_slot_ends_it(self, make):
        loader, cache = make(slots={HIGH: 1}, workers=0)
        with loader.lock:
            loader.upgrade(ExpertId(1, 0), HIGH, 1)
        slot = fetch(loader, ExpertId(0, 0))
        assert (cache.pools[HIGH].memory[slot] == stamp(ExpertId(0, 0), HIGH)).all()

    def test_a_prefetch_goes_first(self, make):
        store, running, gate = a_gated_store()
        loader, _ = make(store=store, workers=1)
        prefetch(loader, ExpertId(3, 0))
        assert running.wait(20)
        with loader.lock:
            loader.upgrade(ExpertId(1, 0), HIGH, 1)
        prefetch(loader, ExpertId(2, 0))
        gate.set()
        until(lambda: not loader.outstanding())
        order = list(dict.fromkeys(expert for expert, _, _ in store.blocks))
        assert order == [ExpertId(3, 0), ExpertId(2, 0), ExpertId(1, 0)]


class TestMasks:
    """What is prefetched is kept until its layer has passed or a pass begins with nothing to keep it for."""

    def test_what_is_resident_and_expected_is_kept_from_a_prefetch(self, make):
        loader, cache = make(slots={HIGH: 1})
        loader.release([(HIGH, fetch(loader, ExpertId(1, 0)))])
        assert prefetch(loader, ExpertId(1, 0)) == 0
        prefetch(loader, ExpertId(2, 0))
        until(lambda: not loader.outstanding())
        assert cache.find(ExpertId(1, 0), HIGH) is not None
        with loader.lock:
            loader.drop(1)
        prefetch(loader, ExpertId(2, 0))
        until(lambda: cache.find(ExpertId(2, 0), HIGH) is not None)

    def test_a_new_pass_drops_what_is_not_there_yet(self, make):
        store, running, gate = a_gated_store()
        loader, cache = make(store=store, workers=1)
        for e in range(3):
            prefetch(loader, ExpertId(1, e))
        assert running.wait(20)
        with loader.lock:
            loader.drop_all()
        gate.set()
        until(lambda: not loader.outstanding())
        assert not cache.resident_bytes()


def test_prefetches_that_go_alone_go_one_at_a_time_and_others_side_by_side(make):
    for alone, most in ((True, 1), (False, 3)):
        running, peak, gate = [], [], threading.Event()

        def trouble(*block, running=running, peak=peak, gate=gate):
            running.append(1)
            peak.append(len(running))
            gate.wait(0.2)
            running.pop()

        loader, _ = make(store=Store(trouble))
        with loader.lock:
            for e in range(3):
                loader.prefetch(Wish(ExpertId(1, e), LOW, alone=alone), 0)
        until(lambda loader=loader: not loader.outstanding())
        assert max(peak) == most


class TestLink:
    def test_parse(self):
        link = Link.parse("2GB/s,20us")
        assert (link.bytes_per_second, link.latency) == (2e9, pytest.approx(2e-5))
        assert Link.parse("150MB/s").latency == 0

    @pytest.mark.parametrize("text", ["", "fast", "2GB", "0GB/s", "2GB/s,5", "-1GB/s"])
    def test_what_is_not_understood(self, text):
        with pytest.raises(ApexError, match="2GB/s,20us"):
            Link.parse(text)

    def test_transfers_queue_up(self):
        link = Link(1e6)
        start = time.perf_counter()
        threads = [threading.Thread(target=link.transfer, args=(20_000,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.perf_counter() - start >= 0.06
        assert link.busy_seconds == pytest.approx(0.06)


@given(
    seed=st.integers(0, 2**32),
    slots=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    host=st.sampled_from([0, 4, 9]),
    policy=st.sampled_from(sorted(POLICIES)),
    failing=st.sampled_from([0.0, 0.05, 0.3]),
    slow=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=6, deadline=None)
def test_threads_at_random(seed, slots, host, policy, failing, slow):
    """1,000 operations from four threads in each example: what they get is theirs and whole, nothing is lost, nothing hangs."""
    chance = random.Random(seed)

    def trouble(expert, precision, start):
        if chance.random() < slow:
            time.sleep(0.0005)
        if chance.random() < failing:
            raise ApexError("a read failed, half done")

    store, tier = Store(trouble), a_host(host) if host else None
    loader = a_loader(dict(zip((HIGH, LOW), slots, strict=True)), policy, store, host=tier)
    cache = loader.residency
    problems = []

    def use(loads):
        while loads:
            try:
                for load in loader.arrived(loads):
                    whole = (cache.pools[load.precision].memory[load.slot] == stamp(load.expert, load.precision)).all()
                    assert whole, f"{load.expert} {load.precision} is not what was asked for"
                    loader.release([(load.precision, load.slot)])
            except ApexError:
                pass

    def check():
        with loader.lock:
            cache.check_integrity()
            if tier:
                tier.check_integrity()

    def run(number):
        mine = random.Random(f"{seed} {number}")
        try:
            for _ in range(250):
                layer, kind = mine.randrange(LAYERS), mine.random()
                precision = mine.choice([HIGH, LOW])
                some = [ExpertId(layer, e) for e in mine.sample(range(EXPERTS), mine.randint(1, 3))]
                if kind < 0.6:
                    share = mine.choice([None, None, 1])
                    coming = []
                    for (
                        expert
                    ) in some:  # one at a time: threads that hold one slot and want another could wait for each other
                        held = request(loader, expert, precision, share=share)
                        if not held.over:
                            coming.append(held)
                        else:
                            loader.release([(precision, held.slot)])
                    if mine.random() < 0.1:
                        loader.forget(coming)
                    else:
                        use(coming)
                elif kind < 0.9:
                    for expert in some:
                        prefetch(loader, expert, precision)
                elif kind < 0.98:
                    with loader.lock:
                        loader.drop(layer)
                else:
                    with loader.lock:
                        loader.drop_all()
                        cache.end_streaming()
                check()
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    hanging = [thread for thread in threads if thread.is_alive()]
    if not hanging:
        loader.close()
    assert not problems and not hanging
    cache.check_integrity()
    assert not any(pool.pins.any() for pool in cache.pools.values()), "a pin was lost"
    assert not loader.outstanding()
