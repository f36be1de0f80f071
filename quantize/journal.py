"""The journal of a conversion under way, in the folder that is written. It says what is done, so that a run that was cut short
goes on where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.atomic import PART
from apex_engine.checkpoint.manifest import FORMAT_VERSION, FileEntry
from apex_engine.errors import ApexError
from apex_engine.quantize.options import Options
from apex_engine.quantize.report import LayerErrors

JOURNAL = "apex-journal.jsonl"


def identity(fingerprint: str, options: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for two runs to write the same checkpoint. `options` as `Options.describe` gives them."""
    return {"version": FORMAT_VERSION, "fingerprint": fingerprint, "options": options}


def refuse_mix(folder: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Raises ApexError where the identity `found` in a folder is not the one `wanted`."""
    if wanted["fingerprint"] != found.get("fingerprint"):
        raise ApexError(f"{folder} holds the twins of another model: choose another directory, or delete this one")
    if wanted != found:
        old, new = ({**asdict(Options()), **side.get("options", {})} for side in (found, wanted))
        changed = ", ".join(f"{k} {old[k]} -> {new[k]}" for k in new if old[k] != new[k]) or "format version"
        raise ApexError(
            f"{folder} was made with other options ({changed}): choose another directory, delete this one, or ask for the same"
        )


class Journal:
    """The record of a conversion under way: one line of identity, then one a finished step. Holds a lock on the folder."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._folder, self._path, self._identity = folder, folder / JOURNAL, identity
        self.files: dict[str, FileEntry] = {}
        self.errors: dict[int, LayerErrors] = {}  # by the layers' numbers

    def __enter__(self) -> Journal:
        if self._folder.exists() and not self._folder.is_dir():
            raise ApexError(f"{self._folder} is a file: name a directory to write to")
        if self._folder.is_dir() and any(self._folder.iterdir()) and not self._path.is_file():
            raise ApexError(f"{self._folder} is not empty and holds no unfinished conversion: choose another directory")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+")
        try:
            self._lock()
            for part in self._folder.rglob(f"*{PART}"):  # left by a run that was killed
                part.unlink()
            self._replay()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind and [path for path in self._folder.rglob("*") if path.is_file()] == [self._path]:
            self._path.unlink()  # nothing was achieved: leave the place to other options
            for folder in (self._folder / "experts", self._folder):
                if folder.is_dir():
                    folder.rmdir()
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ended = (
                os.fstat(self._file.fileno()).st_nlink == 0
            )  # the run that had it ended between our open and our lock
        except OSError:
            ended = True
        if ended:
            raise ApexError(f"another run is writing to {self._folder}: wait for it, or choose another directory")

    def _replay(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]  # a last line without its end was cut by a kill: that step is done again
        lines = whole.splitlines()
        if not lines:
            self._file.truncate(0)
            self._append(self._identity)
            return
        refuse_mix(self._folder, self._identity, json.loads(lines[0]))
        self._file.truncate(len(whole.encode()))
        for line in lines[1:]:
            step = json.loads(line)
            files = {name: FileEntry(n, sha, tuple(blobs)) for name, (n, sha, blobs) in step["files"].items()}
            if all(self._on_disk(name, entry) for name, entry in files.items()):
                self._record(files, step["layer"], step["errors"])

    def _on_disk(self, name: str, entry: FileEntry) -> bool:
        path = self._folder / name
        return path.is_file() and path.stat().st_size == entry.nbytes

    def _record(self, files: dict[str, FileEntry], layer: int | None, errors: LayerErrors) -> None:
        self.files |= files
        if layer is not None:
            self.errors[layer] = errors

    def has(self, names: tuple[str, ...]) -> bool:
        return all(name in self.files for name in names)

    def add(self, files: dict[str, FileEntry], layer: int | None = None, errors: LayerErrors | None = None) -> None:
        """Record finished files; `layer` and its `errors` for expert files."""
        rows = {name: [entry.nbytes, entry.sha256, entry.blobs] for name, entry in files.items()}
        self._append({"files": rows, "layer": layer, "errors": errors or {}})
        self._record(files, layer, errors or {})

    def _append(self, step: dict[str, Any]) -> None:
        self._file.write(json.dumps(step) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
