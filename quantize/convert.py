"""Source checkpoint -> apex checkpoint, one layer at a time, resumable.

A file gets its final name only when it is whole; a journal in the target records what is done, so that a run that was cut
short goes on where it stopped, and the manifest takes the journal's place at the very end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apex_engine.checkpoint.manifest import MANIFEST, LayerEntry, Manifest, guard_name
from apex_engine.checkpoint.moments import Moments
from apex_engine.errors import ApexError
from apex_engine.quantize.dense import plan_dense, write_dense
from apex_engine.quantize.disk import check_space, disk_errors
from apex_engine.quantize.journal import JOURNAL, Journal, identity, refuse_mix
from apex_engine.quantize.ladder import make_twins
from apex_engine.quantize.layer import LayerWork, Progress, write_layer
from apex_engine.quantize.options import Options
from apex_engine.quantize.report import count_fallbacks, summarize
from apex_engine.quantize.rest import write_rest
from apex_engine.quantize.source.model import Source


def convert(
    name: str,
    source: Source,
    folder: Path,
    options: Options,
    progress: Progress,
    moments: Moments | None = None,
    device: str = "cpu",
) -> tuple[Manifest, bool]:
    """Write the apex checkpoint of `source` (called `name` by the user) into `folder`.

    `moments`: those that `options.importance` names. `device` does the arithmetic.

    Returns the manifest, and whether anything was done: a finished checkpoint of the same source and options is left as
    it is. Raises ApexError where `folder` holds anything else, the disk is too small, a weight is not finite, or the moments
    are those of another model.
    """
    twins = make_twins(options, source)
    if moments and moments.fingerprint != source.fingerprint:
        raise ApexError(f"{moments.path} was calibrated on another model than {source.folder}: calibrate this one")
    wanted = identity(source.fingerprint, options.describe())
    if finished := _finished(folder, wanted):
        (folder / JOURNAL).unlink(missing_ok=True)  # a run was killed at its very end
        return finished, False
    known = moments.path if moments else None
    works = [
        LayerWork(source.folder, layer.number, folder, twins, options.low_method, known, device)
        for layer in source.layers
    ]
    plan = plan_dense(source)
    with disk_errors(folder), Journal(folder, wanted) as journal:
        check_space(folder, _bytes_to_come(source, works, plan, journal))
        for work in works:
            if journal.has(work.files):
                progress(source.layers[0].experts)
            else:
                done = write_layer(work, source, progress)
                journal.add(done.files, work.number, done.errors)
        _write_dense_part(source, folder, plan, journal)
        files = {**journal.files, **write_rest(name, source, folder, plan, twins)}
        manifest = Manifest(
            source=name,
            fingerprint=source.fingerprint,
            options=options.describe(),
            experts=source.layers[0].experts,
            twins=twins,
            layers=_entries(source, works),
            dense_bytes=source.dense_bytes,
            files=files,
            errors=summarize(journal.errors, twins),
            fallbacks=count_fallbacks(journal.errors, twins),
        )
        manifest.write(folder)
        journal.remove()
    return manifest, True


def _finished(folder: Path, wanted: dict[str, Any]) -> Manifest | None:
    """The manifest of a checkpoint that is complete already; ApexError where it is that of other twins."""
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    refuse_mix(folder, wanted, identity(manifest.fingerprint, manifest.options))
    return manifest


def _write_dense_part(source: Source, folder: Path, plan: dict[str, list[str]], journal: Journal) -> None:
    for file, tensors in plan.items():
        if not journal.has((file,)):
            guard = guard_name(source.layers[0].module) if file == list(plan)[-1] else None
            journal.add({file: write_dense(source, folder / file, tensors, guard)})


def _bytes_to_come(source: Source, works: list[LayerWork], plan: dict[str, list[str]], journal: Journal) -> int:
    needed = 1 << 20  # the small files
    for work in works:
        if not journal.has(work.files):
            needed += work.nbytes(source.layers[0].experts)
    for file, tensors in plan.items():
        if not journal.has((file,)):
            needed += sum(source.tensors[tensor].nbytes for tensor in tensors)
    return needed


def _entries(source: Source, works: list[LayerWork]) -> tuple[LayerEntry, ...]:
    layers = zip(source.layers, works, strict=True)
    return tuple(LayerEntry(layer.number, layer.module, work.files) for layer, work in layers)
