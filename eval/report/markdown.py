"""The report as Markdown."""

from __future__ import annotations

import re
from typing import Any

from apex_engine.eval.report.blocks import Judged, Plot, Table
from apex_engine.eval.report.sections import sections


def markdown(report: dict[str, Any]) -> str:
    lines = ["# Delta report"]
    for title, blocks in sections(report).items():
        lines += [f"## {title}"] if title else []
        lines += [_markdown_block(block) for block in blocks if not isinstance(block, Plot)]
    return "\n\n".join(lines) + "\n"


def _markdown_block(block: str | Judged | Table) -> str:
    if isinstance(block, str):
        return _markdown_text(block)
    if isinstance(block, Judged):
        return f"**{_markdown_text(block.text)}**"
    rows = [[_markdown_text(cell.text if isinstance(cell, Judged) else cell) for cell in row] for row in block.rows]
    rule = ["---" if i < block.left else "---:" for i in range(len(block.header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [block.header, rule, *rows])


def _markdown_text(text: str) -> str:
    """On one line, with nothing that ends a cell or starts markup."""
    return re.sub(r"([\\|*`\[\]]|<(?=[A-Za-z/!?]))", r"\\\1", " ".join(text.split()))
