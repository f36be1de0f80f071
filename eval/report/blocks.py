"""What a section of the report is made of, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from apex_engine.errors import human

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Judged(NamedTuple):
    """Text that says a verdict and has its colour."""

    text: str
    verdict: str | None


class Table(NamedTuple):
    header: list[str]
    rows: list[list[str | Judged]]
    left: int  # columns of words; those after them are numbers, on the right


class Plot(NamedTuple):
    title: str
    rows: float  # height, in rows of text
    draw: Callable[[Axes], None]


Block: TypeAlias = str | Judged | Table | Plot


def kind_of(verdict: str | None) -> str:
    """A key of `POINTS`."""
    return "bad" if verdict == "worse" else "good" if verdict and verdict.startswith("within") else "open"


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else human(value) if spec == "bytes" else format(value, spec)


def with_error(value: float | None, stderr: float | None, scale: float, spec: str, unit: str = "") -> str:
    """Both times `scale`: -0.01 and 0.005 as "-1.00 ± 0.50 points"."""
    if value is None:
        return "-"
    error = "" if stderr is None else f" ± {abs(scale) * stderr:{spec.lstrip('+')}}"
    return f"{scale * value:{spec}}{error}{unit}"


def finite(value: Any) -> Any:
    """The same with None where a number is not finite, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
