import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_engine.checkpoint.calibration import CALIBRATION, CALIBRATION_VERSION, resolve, twins_of
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import Config
from apex_engine.core.scorer import scores, wanted
from apex_engine.core.thresholds import BINS, Profile, Thresholds, bin_of, bins_above, cheapest, quantiles
from apex_engine.errors import ApexError

HIGH, LOW = 100, 16  # bytes


def profile(seed: int = 0, layers: int = 3) -> Profile:
    """Half of the selections are first experts; errors grow with the gate weight, and leaving out does more harm than LOW."""
    random = np.random.default_rng(seed)
    calls = random.random((layers, 1 + BINS)) / BINS
    calls[:, 0] = 1.0
    gate = 1 - np.arange(1 + BINS) / (BINS + 1)
    low_error = calls * gate**2 * random.random((layers, 1 + BINS))
    return Profile(calls, calls * gate, low_error, low_error * random.uniform(2, 20, (layers, 1)))


def test_bins_agree_with_the_scorer():
    """A threshold that is a multiple of 1 / BINS splits the bins where the scorer splits the scores."""
    gates = np.random.default_rng(0).dirichlet(np.ones(4), 500).astype(np.float32)
    bins = bin_of(scores(gates))
    for t1, t2 in ((0.5, 0.95), (0.0, 0.3), (1.0, 1.0), (-1.0, 0.0)):
        low, skip = bins_above((t1,))[0][bins], bins_above((t2,))[0][bins]
        expected = np.where(skip, 0, np.where(low, 1, 2))
        assert (expected == wanted(gates, (t1, t2))).all()


def saved(found: Thresholds, given: Profile) -> float:
    low, skip = bins_above(found.t1), bins_above(found.t2)
    return float((given.calls * np.where(skip, HIGH, np.where(low, HIGH - LOW, 0))).sum())


def lost(found: Thresholds, given: Profile, sensitivity: np.ndarray) -> float:
    low, skip = bins_above(found.t1), bins_above(found.t2)
    damage = np.where(skip, given.skip_error, np.where(low, given.low_error, 0)).sum(1)
    return float((sensitivity * damage).sum())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(1e-4, 0.5))
def test_what_is_cheapest_keeps_to_the_limit_and_wins_over_one_threshold_for_all(seed, limit):
    given = profile(seed)
    sensitivity = np.array([10.0, 1.0, 0.1])
    found, estimate = cheapest(given, sensitivity, HIGH, LOW, limit)
    assert estimate <= limit and estimate == pytest.approx(lost(found, given, sensitivity))
    assert all(-1 <= a <= b <= 1 for a, b in zip(found.t1, found.t2, strict=True)) and min(found.t2) >= 0
    # The bytes a price buys lie on the convex hull: no other choice has both more bytes and less KL.
    for t1 in np.arange(-1, 1.01, 0.25):
        for t2 in np.arange(max(t1, 0), 1.01, 0.25):
            other = Thresholds.of((t1,) * 3, (t2,) * 3)
            assert saved(other, given) <= saved(found, given) + 1e-9 or lost(other, given, sensitivity) > estimate


def test_more_is_saved_where_less_is_lost():
    given = profile()
    same = Profile(*(np.repeat(part[:1], 2, 0) for part in vars(given).values()))
    found, _ = cheapest(same, np.array([100.0, 1.0]), HIGH, LOW, 0.1)
    assert found.t1[0] > found.t1[1] and found.t2[0] >= found.t2[1]


def test_a_limit_of_nothing_is_all_high_and_a_large_one_all_that_may_go():
    given = profile()
    found, estimate = cheapest(given, np.ones(3), HIGH, LOW, 0.0)
    assert saved(found, given) == 0 and estimate == 0
    found, _ = cheapest(given, np.ones(3), HIGH, LOW, 1e9)
    assert found.t1 == (-1.0,) * 3 and found.t2 == (0.0,) * 3


def test_quantiles_by_hand():
    calls = np.zeros((1, 1 + BINS))
    calls[0, [0, 40, 95]] = [0.67, 0.30, 0.03]
    assert quantiles(Profile(calls, calls, calls, calls)) == (0.0, 0.4)


class TestResolve:
    @pytest.fixture
    def made(self, tiny):
        folder = tiny()[1]
        yield folder, Manifest.read(folder)
        (folder / CALIBRATION).unlink(missing_ok=True)

    def write(self, folder, manifest, **changes):
        layers = len(manifest.layers)
        content = {
            "version": CALIBRATION_VERSION,
            "twins": twins_of(manifest),
            "thresholds": {"t1": [0.1] * layers, "t2": [0.8] * layers},
            "quantiles": [0.4, 0.9],
            "limit": "KL <= 0.02",
        }
        (folder / CALIBRATION).write_text(json.dumps({**content, **changes}))

    def test_defaults(self, made):
        found = resolve(Config(), *made)
        assert found.t1 == (0.75, 0.5) and found.t2 == (0.95, 0.95) and "not calibrated" in found.origin
        assert resolve(Config.make(system="apex"), *made).t1 == (0.6, 0.6)

    def test_a_calibration_is_used_unless_something_is_given(self, made):
        self.write(*made)
        found = resolve(Config(), *made)
        assert found.t1 == (0.1, 0.1) and found.t2 == (0.8, 0.8) and "KL <= 0.02" in found.origin
        assert resolve(Config.make(system="apex"), *made).t1 == (0.4, 0.4)
        assert resolve(Config(t1=0.3), *made).t1 == (0.75, 0.3)
        assert resolve(Config(t1=-1.0), *made).t1 == (-1.0, -1.0)
        with pytest.raises(ApexError, match="give both"):
            resolve(Config(t2=0.2), *made)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"twins": {"fingerprint": "other", "options": {}}}, "other twins"),
            ({"version": 0}, "other twins"),
            ({"thresholds": {"t1": [0.1], "t2": [0.8]}}, "damaged"),
            ({"thresholds": {"t1": ["a", "b"], "t2": [0.8, 0.8]}}, "damaged"),
            ({"quantiles": None}, "damaged"),
        ],
    )
    def test_a_foreign_or_damaged_one_is_refused(self, made, changes, message):
        self.write(*made, **changes)
        with pytest.raises(ApexError, match=message):
            resolve(Config(), *made)
        made[0].joinpath(CALIBRATION).write_text("{")
        with pytest.raises(ApexError, match="damaged"):
            resolve(Config(), *made)
