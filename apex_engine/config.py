"""The one set of run-time options. Defaults live here and nowhere else; the command line reads them from here."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from apex_engine.kernels.pick import KERNELS
from apex_engine.policies import POLICIES
from apex_engine.vocabulary import ApexError

MODES = ("adaptive", "deterministic", "exact")
UNITS = {"": 1, "B": 1}
for _i, _letter in enumerate("KMGT", 1):
    UNITS |= {f"{_letter}B": 1000**_i, f"{_letter}IB": 1024**_i, _letter: 1024**_i}


@dataclass(frozen=True)
class Config:
    """Checked when made: raises ApexError.

    mode    "exact": never LOW, never skipped. "deterministic": the gate score alone decides, whatever is resident.
            "adaptive": the score is asked only about experts that are not resident.
    t1, t2  Thresholds of the cumulative gate score: HIGH up to t1, LOW up to t2, skipped above (MoE-APEX: 0.6, 0.9 for Mixtral).
            A negative t1 makes even a token's first expert LOW: for judging the LOW twins.
    memory  Bytes of resident experts: a number, "6GiB", or "25%" of the bytes of all HIGH twins. Dense weights and the KV
            cache come on top; the plan shows all three.
    low_share  Share of `memory` given to LOW slots.
    policy  Which resident expert makes room: "lcu" or "lru".
    kernels "auto" takes the fastest the machine has for each twin; a name of `apex_engine.kernels.pick` forces one.
    """

    mode: str = "adaptive"
    t1: float = 0.6
    t2: float = 0.9
    memory: int | str = "25%"
    low_share: float = 0.1
    policy: str = "lcu"
    kernels: str = "auto"

    def __post_init__(self) -> None:
        _choice("mode", self.mode, MODES)
        _choice("policy", self.policy, POLICIES)
        _choice("kernels", self.kernels, KERNELS)
        for name in ("t1", "t2", "low_share"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ApexError(f"{name} must be a number, not {getattr(self, name)!r}")
        if not (self.t1 <= self.t2 <= 1.0 and self.t1 >= -1.0):
            raise ApexError(f"thresholds must satisfy -1 <= t1 <= t2 <= 1, not t1 {self.t1}, t2 {self.t2}")
        if not 0.0 <= self.low_share <= 1.0:
            raise ApexError(f"low_share is a share of memory between 0 and 1, not {self.low_share}")
        parse_memory(self.memory, 0)

    @classmethod
    def make(cls, **options: Any) -> Config:
        """Like the constructor, but an unknown option is an ApexError that names the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else "there is nothing like it."
                raise ApexError(f"unknown option {name}: {hint} Options are {', '.join(known)}")
        return cls(**options)


def parse_memory(value: int | str, whole: int) -> int:
    """Bytes of `value`: a number, a number with a unit, or a percentage of `whole`. Raises ApexError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?)\s*(%|[KMGT]?I?B?)\s*", str(value).upper())
    unit = match[2] if match else ""
    if unit != "%" and match and unit not in UNITS:
        match = None
    if not match or isinstance(value, bool):
        raise ApexError(f'memory {value!r} is not understood: give bytes, "6GiB", "500MB" or "25%" of all HIGH twins')
    return int(float(match[1]) * (whole / 100 if unit == "%" else UNITS[unit]))


def _choice(name: str, value: str, known: Any) -> None:
    if value not in known:
        near = get_close_matches(str(value).lower(), list(known), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ApexError(f"unknown {name} {value!r}: {hint}Choose from {', '.join(known)}")
