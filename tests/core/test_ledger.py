import numpy as np

from apex_engine.core import events
from apex_engine.core.events import Stream
from apex_engine.core.ledger import Ledger
from apex_engine.core.vocabulary import ExpertId, Words

EXPERT = ExpertId(0, 1)


def a_ledger(*forms):
    ledger = Ledger(Words.of(forms or ("int2", "bfloat16")))
    return ledger, Stream(ledger).emit


def moved(nbytes, early, asked=False):
    return events.Moved(EXPERT, 2, nbytes, early, asked, 0.5)


def test_calls_are_counted_by_what_they_got_and_what_they_were_worth():
    ledger, emit = a_ledger()
    emit(events.Routed(0, np.array([[1, 2], [2, 3]]), np.ones((2, 2), np.float32), np.array([[2, 1], [2, 0]], np.int8)))
    emit(events.Use(0, 1, 2, 1, 0.5, 0))
    emit(events.Use(0, 2, 1, 2, 1.25, 1))
    emit(events.Use(0, 3, 0, 1, 0.25, 0))
    found = ledger.summary()
    assert found["calls"] == {"total": 4, "high": 1, "low": 2, "skip": 1, "degraded": 1}
    assert found["asked"] == {"high": 2, "low": 1, "skip": 1}
    assert found["share_of_gate_mass"] == {"high": 0.25, "low": 0.625, "skip": 0.125}


def test_twins_of_any_number_go_by_their_words():
    ledger, emit = a_ledger("int2", "int4", "bfloat16")
    emit(events.Use(0, 1, 2, 3, 0.5, 0))
    emit(events.Asked(EXPERT, 3, True, False, 0))
    assert ledger.summary()["calls"] == {"total": 3, "bfloat16": 0, "int4": 3, "int2": 0, "skip": 0, "degraded": 0}
    assert ledger.summary()["hits"] == {"bfloat16": 1, "int4": 0, "int2": 0}
    alone, _ = a_ledger("int4")
    assert list(alone.summary()["hits"]) == ["high"]


def test_a_prefetch_is_useful_once_it_is_asked_for():
    ledger, emit = a_ledger()
    emit(moved(70, early=True))
    assert ledger.summary()["prefetch"]["wasted_bytes"] == 70
    emit(events.Loaded(EXPERT, 2, demand=False))
    emit(events.Asked(EXPERT, 2, resident=True, foreseen=True, early_bytes=70))
    emit(events.Asked(EXPERT, 2, resident=True, foreseen=False, early_bytes=0))
    found = ledger.summary()["prefetch"]
    assert (found["bytes"], found["useful_bytes"], found["wasted_bytes"], found["coverage"]) == (70, 70, 0, 1.0)
    assert ledger.hits[2] == 2 and ledger.missing == 1 and ledger.loads[2] == 0


def test_one_that_is_wanted_while_it_comes_is_useful_too():
    ledger, emit = a_ledger()
    emit(moved(30, early=True))
    emit(events.Asked(EXPERT, 2, resident=False, foreseen=True, early_bytes=30))
    emit(moved(40, early=True, asked=True))
    emit(moved(50, early=False, asked=True))
    emit(events.Loaded(EXPERT, 2, demand=True))
    found = ledger.summary()
    assert found["prefetch"]["useful_bytes"] == found["prefetch"]["bytes"] == 70
    assert found["bytes_read"]["high"] == 120 and found["loads"]["high"] == 1 and found["hits"]["high"] == 0


def test_one_that_is_given_up_stays_wasted():
    ledger, emit = a_ledger()
    emit(moved(30, early=True))
    emit(events.Evicted(EXPERT, 2))
    emit(events.Asked(EXPERT, 2, resident=False, foreseen=False, early_bytes=0))
    assert ledger.summary()["prefetch"]["wasted_bytes"] == 30 and ledger.foreseen == 0


def test_what_an_earlier_ledger_counted_as_prefetched_is_not_useful_here():
    """Else more bytes would be useful than were prefetched."""
    ledger, emit = a_ledger()
    emit(events.Asked(EXPERT, 2, resident=True, foreseen=True, early_bytes=70))
    found = ledger.summary()["prefetch"]
    assert found["useful_bytes"] == found["wasted_bytes"] == 0 and ledger.foreseen == 1


def test_seconds_and_tokens():
    ledger, emit = a_ledger()
    emit(events.PassBegins("prefill", 5, True))
    emit(events.Waited(0.25, 0.125))
    emit(events.Computed(0.5))
    emit(events.PassEnds("prefill", 5, 2.0, 0.0))
    found = ledger.summary()
    assert found["sequences"] == 1 and found["tokens"] == {"prefill": 5, "decode": 0}
    seconds = found["seconds"]
    assert (seconds["stall"], seconds["stall_while_loading"], seconds["compute"], seconds["rest"]) == (
        0.25,
        0.125,
        0.5,
        1.25,
    )
    assert found["tokens_per_second"] == {"prefill": 2.5, "decode": None}
