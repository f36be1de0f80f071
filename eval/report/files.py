"""The delta report on disk: what the engine's modes cost against the reference, as JSON, Markdown and one HTML page.

Nothing is measured or judged here: numbers and verdicts come from one plain dict (`contents.py`), and a missing number is shown
as "-". In it "difference" is engine minus reference, "drop" the opposite, and shares and relative changes are fractions of 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.atomic import atomic_path
from apex_engine.eval.report.blocks import finite
from apex_engine.eval.report.markdown import markdown
from apex_engine.eval.report.page import html


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """report.json, report.md and report.html in `folder`, each whole or absent; the numbers first, then what shows them."""
    renderers: dict[str, Callable[[dict[str, Any]], str]] = {
        "report.json": lambda report: json.dumps(finite(report), allow_nan=False, indent=1) + "\n",
        "report.md": markdown,
        "report.html": html,
    }
    for name, render in renderers.items():
        with atomic_path(folder / name) as part:
            part.write_text(render(report), encoding="utf-8")
    return [folder / name for name in renderers]
