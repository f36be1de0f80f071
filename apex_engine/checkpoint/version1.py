"""Manifests of version 1, which had exactly two twins, named high and low."""

from __future__ import annotations

from typing import Any

from apex_engine.checkpoint.twin import form_name


def as_of_now(old: dict[str, Any]) -> dict[str, Any]:
    """The content of a manifest of version 1 as this version writes it."""
    names = {twin: form_name(old[twin]["up"]["name"], old[twin]["down"]["name"]) for twin in ("low", "high")}
    errors = {}
    for key, error in old["errors"].items():  # "high.up"
        twin, _, matrix = key.partition(".")
        errors[f"{names[twin]}.{matrix}"] = error
    return {
        **old,
        "twins": [{"name": name, "layout": old[twin]} for twin, name in names.items()],
        "layers": [
            {"number": layer["number"], "module": layer["module"], "files": [layer["low"], layer["high"]]}
            for layer in old["layers"]
        ],
        "errors": errors,
    }
