"""The small files of a checkpoint: those copied from the source, config.json, a card, the index of the dense part."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.atomic import atomic_path
from apex_engine.checkpoint.manifest import FORMAT_VERSION, FileEntry, guard_name
from apex_engine.checkpoint.twin import Twin
from apex_engine.kernels.layout import MATRICES
from apex_engine.quantize.source.model import Source

# The source's files that are copied whole; its model card is not, since it is not the card of this checkpoint
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "LICENSE*", "NOTICE*", "*/*.jinja")
CARD = """# apex checkpoint of {name}

{twins}; everything else as in the source. `apex.json` has
the options, the errors and a checksum of every file. It is read by apex-engine only:

    import apex_engine
    model = apex_engine.load("this folder")
"""


def write_rest(
    name: str, source: Source, folder: Path, plan: dict[str, list[str]], twins: tuple[Twin, ...]
) -> dict[str, FileEntry]:
    """Write them into `folder`; `name` is the source's in the words of the user, `plan` that of the dense part."""
    written: dict[str, bytes] = {}
    for path in sorted({path for pattern in COPIED for path in source.folder.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json"):
            written[str(path.relative_to(source.folder))] = path.read_bytes()
    config = {**source.config_json, "quantization_config": _config_entry(twins)}
    written["config.json"] = json.dumps(config, indent=2).encode()
    written["README.md"] = CARD.format(name=name, twins=_in_words(twins)).encode()
    if len(plan) > 1:
        weight_map = {tensor: file for file, tensors in plan.items() for tensor in tensors}
        weight_map[guard_name(source.layers[0].module)] = list(plan)[-1]
        index = {"metadata": {"total_size": source.dense_bytes}, "weight_map": weight_map}
        written["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    for file, content in written.items():
        with atomic_path(folder / file) as part:
            part.write_bytes(content)
    return {file: FileEntry(len(content), sha256(content).hexdigest()) for file, content in written.items()}


def _config_entry(twins: tuple[Twin, ...]) -> dict[str, Any]:
    """What config.json says of the twins: high and low where there are two, else a list."""
    formats = [{matrix: twin.layout.format(matrix).name for matrix in MATRICES} for twin in twins]
    said = {"high": twins[1].name, "low": formats[0]} if len(twins) == 2 else {"twins": formats}
    group = max(twin.layout.format(matrix).group for twin in twins for matrix in MATRICES)
    return {"quant_method": "apex", "version": FORMAT_VERSION, **said, "group_size": group}


def _in_words(twins: tuple[Twin, ...]) -> str:
    if len(twins) == 2:
        low, high = twins
        up, down = low.layout.up.name, low.layout.down.name
        return f"Two twins of every routed expert: HIGH ({high.name}) and LOW (up {up}, down {down})"
    return f"{len(twins)} twins of every routed expert ({', '.join(twin.name for twin in twins)})"
