"""What the quantizer can be asked for. Imports nothing slow: the command line takes its defaults from here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from apex_engine.errors import ApexError
from apex_engine.quantize.forms import FORMS, high_forms, is_grouped, low_forms
from apex_engine.quantize.methods.table import METHODS


@dataclass(frozen=True)
class Options:
    """What the twins are made of. Defaults live here only."""

    high: str = "16bit"  # form of the HIGH twin; "16bit" is the source's own dtype, lossless
    low_method: str = "clip"
    low_down: int = 2  # bits of the down matrix of an int2 LOW twin
    group_size: int = 64
    importance: str = ""  # identity of the second moments the LOW twin is made with; "" without
    low: str = "int2"  # form of the LOW twin, but for what `low_down` says

    @property
    def low_form(self) -> str:
        """The form of the LOW twin: `low_down` turns int2 into int2-int3."""
        return self.low if self.low_down == Options.low_down else f"{self.low}-int{self.low_down}"

    @property
    def forms(self) -> tuple[str, ...]:
        """Of all twins, names in FORMS; the last is HIGH."""
        return self.low_form, self.high

    def check(self) -> None:
        """Raises ApexError for what no source could be given."""
        if self.high not in high_forms():
            raise ApexError(f"unknown HIGH format {self.high}: choose from {', '.join(high_forms())}")
        if self.low not in low_forms():
            raise ApexError(f"unknown LOW format {self.low}: choose from {', '.join(low_forms())}")
        if self.low_method not in METHODS:
            raise ApexError(f"unknown LOW method {self.low_method}: choose from {', '.join(METHODS)}")
        if self.low_method == "gptq" and not self.importance:
            raise ApexError(
                "--low-method gptq needs --importance: make a checkpoint with clip, calibrate it, and name it there"
            )
        if self.low_method == "hqq" and self.importance:
            raise ApexError("--low-method hqq has no use for --importance: use clip or gptq, or drop it")
        if self.low_down not in (2, 3, 4):
            raise ApexError(f"the LOW down matrix can have 2, 3 or 4 bits, not {self.low_down}")
        if self.low_form not in FORMS:
            raise ApexError(
                f"--low-down is for --low int2, and {self.low} says itself what its down matrix is: drop it"
            )
        if not is_grouped(self.low_form) and (self.low_method != Options.low_method or self.importance):
            raise ApexError(f"--low {self.low} has no use for --low-method and --importance: drop them")

    def describe(self) -> dict[str, Any]:
        """As the manifest holds them, by name. `low` came later than the others: where it is what it always was, it is left out,
        so that a checkpoint made before, and its calibration, equal those made now."""
        return {name: value for name, value in asdict(self).items() if name != "low" or value != Options.low}
