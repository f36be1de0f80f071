"""What tells an answer from that of another model, other options or other software."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.calibration import twins_of
from apex_engine.eval.bench import REFERENCE, Bench

ROOT = Path(__file__).resolve().parent.parent  # of a checkout


def identity(bench: Bench, who: str) -> str:
    """Of the answers of `who`, a mode or the reference: where anything in it differs, they are asked for anew."""
    args, engine = bench.args, bench.pair.engine
    reference = args.reference if who == REFERENCE else None
    files = sorted(reference.iterdir()) if reference else []
    parts: dict[str, Any] = {
        "twins": twins_of(bench.manifest),
        "reference": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "thresholds": asdict(engine.thresholds) if who not in (REFERENCE, "exact") else None,
        "config": {**vars(engine.config), "mode": who} if who == "adaptive" else engine.config.kernels,
        "dtype": str(bench.pair.dtype),
        "device": args.device,
        "max_length": args.max_length,
        "template": args.apply_chat_template,
        "versions": versions(),
        "changes": _git("diff", "HEAD"),
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Of this project and of what it stands on."""
    names = ("torch", "transformers", "lm_eval", "datasets", "numpy")
    found = {"apex_engine": version("apex-engine"), **{name: version(name) for name in names}}
    commit = _git("describe", "--always", "--dirty", "--abbrev=12").strip()
    return {**found, "commit": commit} if commit else found


def _git(*arguments: str) -> str:
    """What git says of a checkout of this project; "" elsewhere."""
    if not (ROOT / "pyproject.toml").is_file():
        return ""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
