from dataclasses import fields

import pytest

from apex_engine.config import Config, parse_memory
from apex_engine.core.prefetch import PREFETCHERS
from apex_engine.errors import ApexError
from apex_engine.predict import PREDICTORS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (123, 123),
        ("123", 123),
        ("2KiB", 2048),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("25%", 250),
        ("12.5%", 125),
        ("6gib", 6 << 30),
        ("6G", 6 << 30),
        ("1TiB", 1 << 40),
    ],
)
def test_memory(text, expected):
    assert parse_memory(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "six", "-1", "5 apples", "GiB", "%", None, True, "1e9"])
def test_memory_that_is_not_understood(text):
    with pytest.raises(ApexError, match="not understood"):
        parse_memory(text, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memroy": "1GiB"}, "did you mean memory"),
        ({"T1": 0.5}, "did you mean t1"),
        ({"xyzzy": 1}, "nothing like it"),
        ({"mode": "adaptiv"}, "did you mean adaptive"),
        ({"policy": "mru"}, "Choose from next-use, lcu, lru"),
        ({"t1": 0.9, "t2": 0.6}, "t1 <= t2"),
        ({"t2": 1.5}, "between -1 and 1"),
        ({"t1": "half"}, "a number between"),
        ({"t1": float("nan")}, "a number between"),
        ({"low_share": 2}, "between 0 and 1"),
        ({"memory": "lots"}, "not understood"),
        ({"device_memory": "lots"}, "not understood"),
        ({"host_memory": "lots"}, "not understood"),
        ({"low_share": "most"}, "must be a number"),
        ({"link": "fast"}, "2GB/s,20us"),
        ({"prefetch": 9}, "from 0 to 4"),
        ({"prefetch": "all"}, "from 0 to 4"),
        ({"admission": "steam"}, "did you mean stream"),
        ({"governor": "of"}, "did you mean off"),
        ({"upgrade": "async", "mode": "exact"}, "exact mode forbids"),
        ({"system": "apexx"}, "did you mean apex"),
        ({"first_t1": 2}, "between -1 and 1"),
        ({"thresholds": "quantiles"}, "did you mean quantile"),
        ({"context": 0}, "number of tokens"),
        ({"link": 3}, "2GB/s,20us"),
        ({"device_memory": "50%"}, "a share of nothing"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ApexError, match=message):
        Config.make(**options)


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        Config().mode = "exact"


def test_a_system_sets_the_defaults_of_the_others():
    apex = Config.make(system="apex")
    assert (apex.policy, apex.prefetch, apex.admission, apex.thresholds) == ("lcu", 2, "evict", "quantile")
    assert Config.make(system="apex", t1=0.3).t1 == 0.3
    on_demand = Config.make(system="on-demand")
    assert (on_demand.mode, on_demand.policy, on_demand.prefetch) == ("exact", "lru", 0)
    assert Config.make(system="default") == Config.make() == Config()
    assert (apex.governor, on_demand.governor) == ("off", "on")


def test_every_field_says_what_it_means_and_its_choices_are_kept_to():
    for each in fields(Config):
        assert each.metadata["meaning"], each.name
        for choice in each.metadata["choices"]:
            assert getattr(Config.make(**{each.name: choice}), each.name) == choice
        if each.metadata["choices"]:
            assert each.default in each.metadata["choices"]
            with pytest.raises(ApexError, match=f"unknown {each.name} 'xyzzy'"):
                Config.make(**{each.name: "xyzzy"})


def test_choices_that_are_written_twice_are_those_of_their_tables():
    """Their tables need torch, and reading options does not."""
    choices = {field.name: field.metadata["choices"] for field in fields(Config) if field.metadata.get("choices")}
    assert tuple(choices["predictor"]) == tuple(PREDICTORS)
    assert tuple(choices["governor"]) == tuple(PREFETCHERS)
