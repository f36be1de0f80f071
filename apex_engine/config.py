"""The one set of run-time options. Each is written once, here: its default, its choices and what it means. The command line, its
`--help` and the README's table are made from these fields (`apex_engine.cli.options`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from apex_engine.core.policies import POLICIES
from apex_engine.core.thresholds import DEFAULTS
from apex_engine.errors import ApexError
from apex_engine.kernels.registry import KERNELS

DTYPES = ("auto", "float32", "bfloat16", "float16")  # of the computation
MODES = ("adaptive", "deterministic", "exact")
UNITS = {"": 1, "B": 1}
for _i, _letter in enumerate("KMGT", 1):
    UNITS |= {f"{_letter}B": 1000**_i, f"{_letter}IB": 1024**_i, _letter: 1024**_i}
BASIC, ADVANCED = "basic", "advanced"  # groups of options
T1, T2, FIRST_T1 = DEFAULTS["calibrated"]


def option(
    default: Any,
    meaning: str,
    *,
    group: str | None = ADVANCED,
    choices: Iterable[str] = (),
    metavar: str | None = None,
    kind: Callable[[str], Any] = str,
    unset: str = "",
) -> Any:
    """A field of `Config` and what the command line makes of it.

    `meaning`: its help, from which no user should have to turn to the code. `group` None: no option of the command line. `kind`
    makes a value of the text that was given. `unset`: what holds where the default is None, or says little.
    """
    known = tuple(choices)
    shown = {"meaning": meaning, "group": group, "choices": known, "metavar": metavar, "kind": kind, "unset": unset}
    return field(default=default, metadata=shown)


def number_or_word(text: str) -> float | str:
    """0.3 of "0.3", else the text itself."""
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Config:
    """Checked when made: raises ApexError. What each field means is its `metadata["meaning"]`."""

    mode: str = option(
        "adaptive",
        "exact: never LOW, never skipped; deterministic: the gate score alone decides, whatever is resident; adaptive: the score "
        "is asked only about experts that are not resident",
        group=BASIC,
        choices=MODES,
    )
    thresholds: str = option(
        "calibrated",
        "of the gate score, where none is given below: calibrated, those of each layer that `python -m apex_engine.calibrate` "
        "found for a limit; quantile, MoE-APEX's shares of the model's own scores",
        choices=("calibrated", "quantile"),
    )
    t1: float | None = option(
        None,
        "gate score up to which an expert is HIGH, in all layers (MoE-APEX: 0.6 for Mixtral); below 0, even a token's first "
        "expert is LOW, for judging the LOW twins",
        kind=float,
        metavar="SCORE",
        unset=f"uncalibrated: {T1}",
    )
    t2: float | None = option(
        None,
        "gate score above which an expert is skipped (MoE-APEX: 0.9 for Mixtral)",
        kind=float,
        metavar="SCORE",
        unset=f"uncalibrated: {T2}",
    )
    first_t1: float | None = option(
        None,
        "t1 of the first MoE layer, where it is higher than t1: what goes wrong there goes through all layers",
        kind=float,
        metavar="SCORE",
        unset=f"uncalibrated: {FIRST_T1}",
    )
    memory: int | str = option(
        "25%",
        'for resident experts: bytes, "6GiB", or a share of all HIGH twins; dense weights and the KV cache come on top',
        group=BASIC,
        metavar="BYTES",
    )
    device_memory: int | str | None = option(
        None,
        'instead of memory: bytes for dense weights, KV cache and experts together; "auto": what is free, less a tenth',
        group=BASIC,
        metavar="BYTES",
        unset="none",
    )
    context: int = option(2048, "tokens whose KV cache device_memory counts", group=None, kind=int)
    host_memory: int | str = option(
        0,
        "bytes of a second tier of experts in host memory, with a GPU or a simulated link; a share is one of all twins; filled "
        "at the start if it holds all of them",
        group=BASIC,
        metavar="BYTES",
        unset="none",
    )
    low_share: float | str = option(
        "auto",
        'share of the memory for LOW twins; "auto": a twentieth, calibrated a tenth; "floor": all of them are resident',
        metavar="SHARE",
        kind=number_or_word,
    )
    upgrade: str = option(
        "wait",
        "where HIGH is wanted and only LOW is resident: wait for HIGH; async: LOW serves, counted as degraded, and HIGH comes "
        "later (adaptive mode only)",
        choices=("wait", "async"),
    )
    policy: str = option("next-use", "which resident expert makes room; lcu is MoE-APEX's", choices=POLICIES)
    admission: str = option(
        "stream",
        "stream: a prompt fills free slots and streams the rest through a few, so that what decoding uses stays; evict: it "
        "takes slots like decoding does",
        choices=("stream", "evict"),
    )
    prefetch: int = option(
        1, "layers ahead that experts are predicted and fetched; 0: not at all", kind=int, metavar="LAYERS"
    )
    predictor: str = option(
        "learned",
        "what says which experts come: gate, the later layer's router with this layer's input (MoE-APEX); norm, the same with "
        "the norm weight corrected; learned, a copy of that router which learns from every token, and for the first layer from "
        "the token's embedding",
        choices=("gate", "norm", "learned"),
    )
    governor: str = option(
        "on",
        "on: prefetch no more than the link brings while nobody waits, only layers whose predictions are trusted, and only where "
        "trying it has shown a gain; off: fetch all that is predicted, as MoE-APEX does",
        choices=("on", "off"),
    )
    link: str | None = option(
        None, 'simulate a link to the device, such as "2GB/s,20us"', metavar="RATE,LATENCY", unset="none"
    )
    kernels: str = option(
        "auto",
        "what computes the experts; auto takes the fastest the machine has for each twin",
        choices=KERNELS,
    )

    def __post_init__(self) -> None:
        for name, known in ((each.name, each.metadata["choices"]) for each in fields(self)):
            if known:
                _choice(name, getattr(self, name), known)
        self._check_thresholds()
        self._check_memory()
        if not (isinstance(self.prefetch, int) and 0 <= self.prefetch <= 4):
            raise ApexError(f"prefetch is a number of layers from 0 to 4, not {self.prefetch!r}")
        if self.upgrade == "async" and self.mode != "adaptive":
            raise ApexError(f"upgrade async serves LOW where HIGH is wanted, which {self.mode} mode forbids: drop it")
        if self.link is not None:
            parse_link(str(self.link))

    def _check_thresholds(self) -> None:
        for name in ("t1", "t2", "first_t1"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and -1.0 <= value <= 1.0):
                raise ApexError(f"{name} is a threshold, a number between -1 and 1, not {value!r}")
        if self.t1 is not None and self.t2 is not None and self.t1 > self.t2:
            raise ApexError(f"thresholds must satisfy t1 <= t2, not t1 {self.t1}, t2 {self.t2}")

    def _check_memory(self) -> None:
        share = self.low_share if self.low_share not in ("auto", "floor") else 0.0
        if not isinstance(share, (int, float)):
            raise ApexError(f"low_share must be a number, not {share!r}")
        if not 0.0 <= float(share) <= 1.0:
            raise ApexError(f'low_share is a share of memory between 0 and 1, "auto" or "floor", not {self.low_share}')
        if not (isinstance(self.context, int) and self.context > 0):
            raise ApexError(f"context is a number of tokens, not {self.context!r}")
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


# "apex" is MoE-APEX as published: two layers of plain gate reuse, all of it fetched, LCU, prompts like any other pass;
# "on-demand" is what engines without twins do.
SYSTEMS: dict[str, dict[str, Any]] = {
    "default": {},
    "apex": {
        "policy": "lcu",
        "admission": "evict",
        "prefetch": 2,
        "predictor": "gate",
        "thresholds": "quantile",
        "governor": "off",
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


def command_line() -> tuple[Field[Any], ...]:
    """The fields that are options of the command line, those of the basic group first."""
    offered = [each for each in fields(Config) if each.metadata["group"]]
    return tuple(sorted(offered, key=lambda each: (BASIC, ADVANCED).index(each.metadata["group"])))


def _choice(name: str, value: str, known: Any) -> None:
    if value not in known:
        near = get_close_matches(str(value).lower(), list(known), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ApexError(f"unknown {name} {value!r}: {hint}Choose from {', '.join(known)}")
