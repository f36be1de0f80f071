"""What a layer step and a pass ask of the tier, and in which order: on the plain tier, which writes down what it is asked."""

import numpy as np
import pytest
import torch
from plain_tier import PlainTier

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import Config
from apex_engine.core.prefetch import Choice
from apex_engine.kernels.base import Activation, swiglu
from apex_engine.runtime import build
from apex_engine.runtime.engine import Engine
from apex_engine.runtime.step import pieces

ACTIVATION = Activation(swiglu, swiglu=True)


class Written(PlainTier):
    """Calls are written to `said`."""

    said: list

    def request(self, expert, precision, now, share=None):
        self.said.append(("request", expert.expert, precision, share is not None))
        return super().request(expert, precision, now, share)

    def settle(self, tickets, busy):
        tickets = list(tickets)
        self.said.append(("settle", [ticket.expert.expert for ticket in tickets]))
        super().settle(tickets, busy)

    def arrived(self, tickets):
        self.said.append(("wait", [ticket.expert.expert for ticket in tickets]))
        return super().arrived(tickets)

    def prefetch(self, wish, now):
        self.said.append(("prefetch", *wish.expert, wish.precision))
        return super().prefetch(wish, now)

    def upgrade(self, expert, precision, now):
        self.said.append(("upgrade", expert.expert, precision))

    def drop(self, layer):
        self.said.append(("drop", layer))
        super().drop(layer)

    def drop_all(self):
        self.said.append(("drop all",))

    def end_streaming(self):
        self.said.append(("end streaming",))
        super().end_streaming()


class Foresight:
    """Foresees experts 0 and 1 of every layer."""

    ready, unknown = True, ()

    def predict(self, now, later, x):
        return Choice(np.array([[0.5, 0.5]], np.float32), np.array([[0, 1]]))

    def observe(self, layer, x):
        pass

    def learn(self):
        pass


@pytest.fixture
def engine(tiny, monkeypatch):
    """Makes engines of a tiny checkpoint on the written tier."""

    def make(**options):
        monkeypatch.setattr(build, "Carrier", lambda source, *rest: source)
        monkeypatch.setattr(build, "Loader", lambda cache, source, stream, host: Written(cache, source, stream))
        folder = tiny()[1]
        strides = Manifest.read(folder).strides
        memory = 3 * strides[2] + 4 * strides[1]
        made = Engine.open(folder, Config.make(**{"memory": memory, "low_share": 0.3, **options}))
        Written.said = []
        made.prepare(torch.device("cpu"), torch.float32)
        return made

    return make


def step(engine, layer, chosen, gates=(0.7, 0.3)):
    Written.said.clear()
    x = torch.randn(len(chosen), 64)
    weights = torch.tensor([list(gates)] * len(chosen))
    return engine.step(layer, x, torch.tensor(chosen), weights, ACTIVATION)


def test_all_is_asked_for_and_has_its_slots_before_anything_is_waited_for(engine):
    made = engine(mode="exact")
    made.begin_pass("decode", 1, True)
    step(made, 1, [[0, 3]])
    assert Written.said[:4] == [
        ("request", 0, 2, False),
        ("request", 3, 2, False),
        ("settle", [0, 3]),
        ("drop", 1),
    ]
    assert Written.said[4][0] == "wait"


def test_what_is_there_is_not_settled_and_not_waited_for(engine):
    made = engine(mode="exact")
    made.begin_pass("decode", 1, True)
    step(made, 0, [[0, 3]])
    step(made, 0, [[0, 3]])
    assert not [said for said in Written.said if said[0] in ("settle", "wait")]


def test_looking_ahead_comes_after_the_demands_and_before_waiting(engine):
    made = engine(mode="exact", governor="off", prefetch=1)
    made.predictor = Foresight()
    made.begin_pass("decode", 1, True)
    step(made, 0, [[0, 3]])
    names = [said[0] for said in Written.said]
    assert names.index("settle") < names.index("prefetch") < names.index("wait")
    assert [said for said in Written.said if said[0] == "prefetch"] == [("prefetch", 1, 0, 2), ("prefetch", 1, 1, 2)]


def test_a_pass_drops_prefetches_and_decoding_frees_what_a_prompt_streamed(engine):
    made = engine(mode="exact")
    Written.said.clear()
    made.begin_pass("prefill", 9, True)
    assert Written.said == [("drop all",)]
    Written.said.clear()
    made.begin_pass("decode", 1, False)
    assert Written.said == [("drop all",), ("end streaming",)]


def test_a_streamed_prompt_frees_its_slots_when_decoding_begins(engine):
    made = engine(mode="exact", prefetch=0)
    made.begin_pass("prefill", 6, True)
    for layer in range(2):
        step(made, layer, [[0, 1], [2, 3], [4, 5]], (0.6, 0.4))
    pool = made.device.cache.pools[2]
    assert pool.passing.any()
    made.begin_pass("decode", 1, False)
    assert not pool.passing.any() and pool.free


def test_a_prompt_is_streamed_and_decoding_is_not(engine):
    made = engine(mode="exact")
    for phase, streamed in (("prefill", True), ("decode", False)):
        made.begin_pass(phase, 1, False)
        step(made, 0, [[1, 2]])
        assert {said[3] for said in Written.said if said[0] == "request"} == {streamed}


def test_upgrades_are_asked_for_where_low_serves(engine):
    made = engine(upgrade="async", t1=0.6, t2=0.9, first_t1=0.6)
    made.begin_pass("decode", 1, True)
    step(made, 1, [[0, 3]], (0.7, 0.3))  # HIGH, LOW
    step(made, 1, [[3, 0]], (0.7, 0.3))  # LOW is there, HIGH is worth it; HIGH is there
    assert ("upgrade", 3, 2) in Written.said and ("request", 3, 1, False) in Written.said
    assert ("request", 0, 2, False) in Written.said


def test_a_prompt_in_pieces_is_the_same_as_whole(engine, monkeypatch):
    made = engine(mode="exact", prefetch=0)
    x, chosen = torch.randn(9, 64), torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    made.begin_pass("prefill", 9, True)
    whole = made.step(0, x, chosen, weights, ACTIVATION)
    monkeypatch.setattr("apex_engine.memory.plan.STEP_BYTES", 4 * 2 * 64 * 4)  # four tokens
    torch.testing.assert_close(made.step(0, x, chosen, weights, ACTIVATION), whole, rtol=0, atol=1e-5)
    alone = [made.step(0, x[a:b], chosen[a:b], weights[a:b], ACTIVATION) for a, b in ((0, 6), (6, 9))]
    together = made.step(0, x, chosen, weights, ACTIVATION, [6, 3])
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([1], 8, [(1,)]),
        ([0], 8, [(0,)]),
        ([3, 9], 4, [(3,), (4,), (4,), (1,)]),
        ([2, 2, 3], 4, [(2, 2), (3,)]),
        ([8], 4, [(4,), (4,)]),
    ],
)
def test_pieces(sizes, most, expected):
    assert pieces(sizes, most) == expected


def test_the_books_of_a_stopped_call_are_recovered_by_the_next(engine, monkeypatch):
    made = engine(mode="exact")
    made.begin_pass("decode", 1, True)
    recovered = []
    monkeypatch.setattr(Written, "recover", lambda self: recovered.append(1))
    monkeypatch.setattr(Written, "drop", lambda self, layer: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        step(made, 0, [[0, 1]])
    monkeypatch.undo()
    monkeypatch.setattr(Written, "recover", lambda self: recovered.append(1))
    made.begin_pass("decode", 1, False)
    made.begin_pass("decode", 1, False)
    assert recovered == [1]
