"""One form of every routed expert of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from apex_engine.kernels.layout import MATRICES, Layout


@dataclass(frozen=True)
class Twin:
    """`name` is that of its form: "int2", "bfloat16", or both of its matrices' formats, "int2-int3"."""

    name: str
    layout: Layout

    @classmethod
    def of(cls, layout: Layout) -> Twin:
        return cls(form_name(layout.up.name, layout.down.name), layout)

    @property
    def grouped(self) -> tuple[str, ...]:
        """The matrices whose weights share scales in groups."""
        return tuple(matrix for matrix in MATRICES if self.layout.format(matrix).grouped)


def form_name(up: str, down: str) -> str:
    """What a form is called, by the formats of its matrices."""
    return up if up == down else f"{up}-{down}"
