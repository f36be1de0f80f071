"""apex info CHECKPOINT: what is in an apex checkpoint, how it was made, and what its twins cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex_engine.cli.console import console, say
from apex_engine.errors import ApexError, human

if TYPE_CHECKING:
    from apex_engine.checkpoint.manifest import Manifest


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="apex info",
        description="Say what is in an apex checkpoint: its source, its experts, their twins with bytes and errors, and its "
        "calibration. Only the manifest is read; `apex verify` reads all.",
    )
    p.add_argument("checkpoint", type=Path, help="folder written by `python -m apex_engine.quantize`")
    p.add_argument("--json", action="store_true", help="all of it as JSON on stdout, and no table")
    return p


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    show_info(args.checkpoint, as_json=args.json)


def show_info(folder: Path, as_json: bool = False) -> None:
    """A table on stderr and a line on stdout, or JSON on stdout. Raises ApexError where `folder` is no finished checkpoint."""
    from apex_engine.checkpoint.manifest import Manifest  # not for --help
    from apex_engine.cli.twin_table import twin_lines, twin_table

    manifest = Manifest.read(folder)
    found = describe(folder, manifest)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console.print(twin_table(manifest))
    for line in twin_lines(manifest):
        say(line)
    say(f"source {found['source']}, fingerprint {found['fingerprint'][:16]}")
    say("made with " + ", ".join(f"{name} {value}" for name, value in found["options"].items() if value != ""))
    say(_calibration_in_words(found["calibration"]))
    forms = " and ".join(twin["name"] for twin in reversed(found["twins"]))
    print(
        f"{folder}: {found['source']}, {found['moe_layers']} MoE layers of {found['experts']} experts as {forms}, "
        f"{human(found['bytes'])}"
    )


def describe(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What the JSON says; twins stand in it fewest bytes first."""
    return {
        "source": manifest.source,
        "fingerprint": manifest.fingerprint,
        "options": manifest.options,
        "moe_layers": len(manifest.layers),
        "experts": manifest.experts,
        "dense_bytes": manifest.dense_bytes,
        "bytes": sum(entry.nbytes for entry in manifest.files.values()),
        "twins": [_twin(manifest, precision) for precision in manifest.precisions],
        "fallbacks": manifest.fallbacks,
        "calibration": _calibration(folder, manifest),
    }


def _twin(manifest: Manifest, precision: int) -> dict[str, Any]:
    twin = manifest.twins[precision - 1]
    matrices = {}
    for matrix in ("up", "down"):
        form = twin.layout.format(matrix)
        matrices[matrix] = {"format": form.name, "group": form.group, **manifest.errors[f"{twin.name}.{matrix}"]}
    return {
        "name": twin.name,
        "called": manifest.words[precision],
        "bytes_an_expert": twin.layout.stride,
        "bytes": twin.layout.stride * manifest.experts * len(manifest.layers),
        "bits_a_weight": twin.layout.bits_per_weight,
        "matrices": matrices,
    }


def _calibration(folder: Path, manifest: Manifest) -> dict[str, str] | None:
    """Its limit, or what is wrong with it; None where there is none."""
    from apex_engine.checkpoint.calibration import read_calibration

    try:
        content = read_calibration(folder, manifest)
    except ApexError as error:
        return {"unusable": str(error)}
    return content and {"limit": content["limit"]}


def _calibration_in_words(found: dict[str, str] | None) -> str:
    if found is None:
        return "not calibrated"
    return (
        f"calibrated for {found['limit']}" if "limit" in found else f"its calibration is unusable: {found['unusable']}"
    )
