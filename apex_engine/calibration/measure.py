"""The calibration of a checkpoint, from the first text to the file beside it.

    1. text, given or sampled from the model itself
    2. an exact pass over it: second moments of the experts' inputs, errors of the LOW twins by gate score
    3. each layer with LOW twins alone: what an error there does to the predictions
    4. thresholds for a limit, tried and corrected until what is measured meets it

Letters: W windows, N tokens a window.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from apex_engine.calibration.recorder import Recorder
from apex_engine.calibration.room import check_room
from apex_engine.calibration.rows import rows_of
from apex_engine.calibration.search import CURVE, SEARCH_ROUNDS, Advance, Limit, Trials, search, sensitivities
from apex_engine.calibration.settings import Settings
from apex_engine.checkpoint.atomic import atomic_file
from apex_engine.checkpoint.calibration import CALIBRATION, CALIBRATION_VERSION, twins_of
from apex_engine.checkpoint.manifest import Manifest
from apex_engine.checkpoint.moments import write_moments
from apex_engine.cli.console import progress
from apex_engine.core.thresholds import quantiles
from apex_engine.eval.texts import read_text
from apex_engine.memory.probe import parse_device
from apex_engine.runtime.engine import Engine
from apex_engine.runtime.hook import load

TRIAL_WINDOWS = 16  # that thresholds are tried on
MOST_LOGITS = 1 << 30  # bytes of the reference's predictions that are kept


def calibrate(folder: Path, limit: Limit, settings: Settings) -> dict[str, Any]:
    """Measure an apex checkpoint, and write both files beside it. Returns the content of the JSON file. Raises ApexError."""
    manifest = Manifest.read(folder)
    check_room(folder, manifest, settings)
    text = None if settings.data == "self" else read_text(settings.data)
    # The thresholds of an earlier calibration, perhaps of other twins, have no part in this one.
    options: dict[str, Any] = {"mode": "deterministic", "memory": settings.memory, "prefetch": 0, "t1": 0.5}
    model = load(folder, device=parse_device(settings.device), **options)
    engine: Engine = model.apex
    rows, what = rows_of(model, folder, text, settings)
    with progress("recording", len(rows)) as advance:
        recorder = record(model, folder, rows, settings, advance)
    profile = recorder.profile()
    write_moments(folder, manifest.fingerprint, recorder.tensors())
    vocabulary = model.config.get_text_config().vocab_size
    few = max(2, min(len(rows), TRIAL_WINDOWS, MOST_LOGITS // (4 * vocabulary * rows.shape[1])))
    engine.decide("exact")
    trials = Trials(model, rows[:: max(1, len(rows) // few)][:few], settings.batch_size)
    with progress("trying LOW twins, layer by layer", len(manifest.layers) * len(trials)) as advance:
        sensitivity = sensitivities(trials, profile, advance)
    with progress("trying thresholds", (SEARCH_ROUNDS + len(CURVE) - 1) * len(trials)) as advance:
        thresholds, point, curve = search(trials, profile, sensitivity, manifest, limit, advance)
    engine.close()
    content = {
        "version": CALIBRATION_VERSION,
        "twins": twins_of(manifest),
        "data": what,
        "tokens": rows.numel(),
        "limit": str(limit),
        "thresholds": {"t1": thresholds.t1, "t2": thresholds.t2},
        "measured": point,
        "quantiles": quantiles(profile),
        "curve": curve,
        "layers": {
            "sensitivity": sensitivity.tolist(),
            "kl_all_low": (sensitivity * profile.low_error.sum(1)).tolist(),
        },
        "experts": _experts(recorder),
        "profile": {name: np.round(values, 9).tolist() for name, values in asdict(profile).items()},
    }
    with atomic_file(folder / CALIBRATION) as file:
        file.write(json.dumps(content).encode())
    return content


def record(model: PreTrainedModel, folder: Path, rows: Tensor, settings: Settings, advance: Advance) -> Recorder:
    """An exact pass over the windows `rows` `[W, N]`."""
    engine: Engine = model.apex
    recorder = Recorder(folder, engine.manifest, settings.block)
    engine.decide("exact")
    try:
        with engine.watched(recorder):
            for some in rows.split(settings.batch_size):
                with torch.no_grad():
                    model(input_ids=some.to(model.device), use_cache=False)
                advance(len(some))
    finally:
        recorder.close()
    return recorder


def _experts(recorder: Recorder) -> dict[str, Any]:
    """By layer and expert: the tokens that chose it, and the relative error of its LOW twin's output."""
    low, whole = np.moveaxis(recorder.errors, 2, 0)
    error = np.sqrt(low / np.maximum(whole, np.finfo(np.float64).tiny))
    return {"tokens": recorder.tokens.tolist(), "low_error": error.round(4).tolist()}
