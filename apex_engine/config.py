"""The one set of run-time options. Defaults live here and nowhere else; the command line reads them from here."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from apex_engine.core.policies import POLICIES
from apex_engine.errors import ApexError
from apex_engine.kernels.registry import KERNELS

THRESHOLDS = ("calibrated", "quantile")
PREDICTORS = ("gate", "norm", "learned")
DTYPES = ("auto", "float32", "bfloat16", "float16")  # of the computation
MODES = ("adaptive", "deterministic", "exact")
UNITS = {"": 1, "B": 1}
for _i, _letter in enumerate("KMGT", 1):
    UNITS |= {f"{_letter}B": 1000**_i, f"{_letter}IB": 1024**_i, _letter: 1024**_i}


@dataclass(frozen=True)
class Config:
    """Checked when made: raises ApexError.

    mode    "exact": never LOW, never skipped. "deterministic": the gate score alone decides, whatever is resident.
            "adaptive": the score is asked only about experts that are not resident.
    thresholds  Of the cumulative gate score, where none is given: "calibrated", those of each layer that `apex_engine.calibrate`
            found for a limit; "quantile", the shares of MoE-APEX in the model's own scores. Defaults without a calibration.
    t1, t2  Thresholds of all layers: HIGH up to t1, LOW up to t2, skipped above (MoE-APEX: 0.6, 0.9 for Mixtral). A negative t1
            makes even a token's first expert LOW: for judging the LOW twins.
    first_t1  The t1 of the first MoE layer, where it is higher than t1: what goes wrong there goes through all layers.
    memory  Bytes of resident experts: a number, "6GiB", or "25%" of the bytes of all HIGH twins. Dense weights and the KV
            cache come on top; the plan shows all three.
    device_memory  Instead of `memory`: bytes for all of it, the KV cache of `context` tokens included. "auto" is what is free
            when the model is loaded, less a tenth.
    host_memory  Bytes of a second tier in host memory, between disk and device: for a GPU or a simulated link. A share is one
            of all twins. It is filled when the model is loaded if it holds them all, else it is a cache of its own.
    low_share  Share of `memory` given to LOW slots. "auto" is a twentieth, or a tenth with a calibration; "floor": every LOW twin
            is resident, the rest are HIGH slots.
    upgrade "wait": what the score wants HIGH is waited for. "async": where its LOW twin is resident, that serves now and HIGH
            is fetched meanwhile; counted as degraded. Adaptive mode only.
    policy  Which resident expert makes room: a name of `apex_engine.policies`.
    admission  "stream": a prompt fills free slots and streams the rest through a few, so that what decoding uses stays.
            "evict": it takes slots like decoding does.
    prefetch  How many layers ahead experts are predicted and fetched; 0: not at all.
    predictor  What says which experts come: "gate", the later layer's router with this layer's input (MoE-APEX); "norm", the
            same with the norm weight corrected; "learned", a copy of that router which learns from every token, and for the first
            layer from the token's embedding.
    link    A simulated link to the device: "2GB/s,20us".
    kernels "auto" takes the fastest the machine has for each twin; a name of `apex_engine.kernels.pick` forces one.
    """

    mode: str = "adaptive"
    thresholds: str = "calibrated"
    t1: float | None = None
    t2: float | None = None
    first_t1: float | None = None
    memory: int | str = "25%"
    device_memory: int | str | None = None
    context: int = 2048
    host_memory: int | str = 0
    low_share: float | str = "auto"
    upgrade: str = "wait"
    policy: str = "next-use"
    admission: str = "stream"
    prefetch: int = 1
    predictor: str = "learned"
    governor: str = "on"
    link: str | None = None
    kernels: str = "auto"

    def __post_init__(self) -> None:
        _choice("mode", self.mode, MODES)
        _choice("policy", self.policy, POLICIES)
        _choice("kernels", self.kernels, KERNELS)
        _choice("predictor", self.predictor, PREDICTORS)
        _choice("upgrade", self.upgrade, ("wait", "async"))
        _choice("admission", self.admission, ("stream", "evict"))
        _choice("thresholds", self.thresholds, THRESHOLDS)
        share = self.low_share if self.low_share not in ("auto", "floor") else 0.0
        for name in ("t1", "t2", "first_t1"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and -1.0 <= value <= 1.0):
                raise ApexError(f"{name} is a threshold, a number between -1 and 1, not {value!r}")
        if self.t1 is not None and self.t2 is not None and self.t1 > self.t2:
            raise ApexError(f"thresholds must satisfy t1 <= t2, not t1 {self.t1}, t2 {self.t2}")
        if not isinstance(share, (int, float)):
            raise ApexError(f"low_share must be a number, not {share!r}")
        if not 0.0 <= float(share) <= 1.0:
            raise ApexError(f'low_share is a share of memory between 0 and 1, "auto" or "floor", not {self.low_share}')
        if not (isinstance(self.prefetch, int) and 0 <= self.prefetch <= 4):
            raise ApexError(f"prefetch is a number of layers from 0 to 4, not {self.prefetch!r}")
        if self.upgrade == "async" and self.mode != "adaptive":
            raise ApexError(f"upgrade async serves LOW where HIGH is wanted, which {self.mode} mode forbids: drop it")
        if not (isinstance(self.context, int) and self.context > 0):
            raise ApexError(f"context is a number of tokens, not {self.context!r}")
        if self.link is not None:
            parse_link(str(self.link))
        parse_memory(self.memory, 0)
        parse_memory(self.host_memory, 0)
        if self.device_memory not in (None, "auto"):
            parse_memory(self.device_memory, 0)
            if "%" in str(self.device_memory):
                raise ApexError(
                    f'device_memory {self.device_memory} is a share of nothing: give bytes, "6GiB" or "auto"'
                )

    @classmethod
    def make(cls, **options: Any) -> Config:
        """Like the constructor, but an unknown option is an ApexError that names the nearest known one.

        One more option: `system`, a name of `SYSTEMS`, whose settings are the defaults of the others.
        """
        known = ["system", *(field.name for field in fields(cls))]
        for name in options:
            if name not in known:
                near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else "there is nothing like it."
                raise ApexError(f"unknown option {name}: {hint} Options are {', '.join(known)}")
        system = options.pop("system", "default")
        _choice("system", system, SYSTEMS)
        return cls(**{**SYSTEMS[system], **options})


# "apex" is MoE-APEX as published: two layers of plain gate reuse, LCU, prompts like any other pass; "on-demand" is what engines
# without twins do.
SYSTEMS: dict[str, dict[str, Any]] = {
    "default": {},
    "apex": {
        "policy": "lcu",
        "admission": "evict",
        "prefetch": 2,
        "predictor": "gate",
        "governor": "off",
        "thresholds": "quantile",
    },
    "on-demand": {"mode": "exact", "policy": "lru", "admission": "evict", "prefetch": 0},
}


def parse_link(text: str) -> tuple[float, float]:
    """Bytes a second and seconds of latency of "2GB/s,20us" (the latency may be left out). Raises ApexError."""
    rate = r"(\d+(?:\.\d*)?)\s*([KMG]?)B/s"
    match = re.fullmatch(rf"\s*{rate}\s*(?:,\s*(\d+(?:\.\d*)?)\s*(s|ms|us)\s*)?", text)
    if not match or not float(match[1]):
        raise ApexError(f'link {text!r} is not understood: give a rate and a latency, such as "2GB/s,20us"')
    latency = float(match[3] or 0) * {"s": 1, "ms": 1e-3, "us": 1e-6, None: 0}[match[4]]
    return float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[match[2]], latency


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
