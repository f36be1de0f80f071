"""Ctrl-C at any moment: the next call answers as if nothing had happened, and the books are in order."""

import random
import signal
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from transformers import AutoModelForCausalLM

import apex_engine


@contextmanager
def interrupted(after):
    """KeyboardInterrupt comes `after` seconds, wherever this thread is then, as from the handler of Ctrl-C."""

    def handler(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, after)
            yield
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "exact"},
        {"mode": "exact", "link": "200MB/s", "host_memory": "60%", "prefetch": 2, "governor": "off"},
        {"mode": "deterministic", "low_share": "floor"},
    ],
    ids=["slots", "link and host tier", "floor"],
)
def test_stopped_anywhere_the_next_call_answers(tiny, options):
    model = apex_engine.load(tiny()[1], dtype=torch.float32, memory="40%", **options)
    ids = torch.randint(2, 128, (1, 9))

    def write():
        return model.generate(ids, max_new_tokens=4, min_new_tokens=4)

    expected = write()
    start = time.perf_counter()
    write()
    seconds, draw, stopped = time.perf_counter() - start, random.Random(str(options)), 0
    for _ in range(60):
        with interrupted(max(1e-4, draw.uniform(0, seconds))):
            write()
            stopped -= 1
        stopped += 1
        assert torch.equal(write(), expected)
        model.apex.check_integrity()
        assert not any(pool.pins.any() for pool in model.apex.device.cache.pools.values())
    assert stopped > 10


def test_stopped_while_it_is_made_the_first_call_makes_it(tiny):
    ids = torch.randint(2, 128, (1, 5))
    expected = apex_engine.load(tiny()[1], dtype=torch.float32, mode="exact", memory="40%")(ids).logits
    for _ in range(5):
        model = AutoModelForCausalLM.from_pretrained(tiny()[1], dtype=torch.float32)
        model.apex.decide("exact")
        with interrupted(random.Random(0).uniform(1e-4, 1e-2)):
            model(ids)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
