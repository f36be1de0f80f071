"""The calibration beside a checkpoint, and the thresholds that a run takes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import Config
from apex_engine.core.thresholds import DEFAULTS, Thresholds
from apex_engine.errors import ApexError

CALIBRATION = "calibration.json"  # beside the checkpoint


CALIBRATION_VERSION = 1


def resolve(config: Config, folder: Path, manifest: Manifest) -> Thresholds:
    """Those of `config` where it names any, else the calibration's, else the defaults. Raises ApexError for a calibration of
    other twins."""
    layers, twins = len(manifest.layers), len(manifest.twins)
    t1, t2, first_t1 = DEFAULTS[config.thresholds]
    given = [config.t1, config.t2, config.first_t1]
    if given != [None, None, None]:
        t1, t2, first_t1 = (new if new is not None else old for new, old in zip(given, (t1, t2, first_t1), strict=True))
        if not t1 <= t2:
            raise ApexError(f"thresholds must satisfy t1 <= t2, not t1 {t1}, t2 {t2}: give both")
        return Thresholds.uniform(layers, t1, t2, first_t1, "given", twins)
    content = None if config.mode == "exact" else read_calibration(folder, manifest)
    if content is None:
        which = "MoE-APEX's for Mixtral" if config.thresholds == "quantile" else "default"
        return Thresholds.uniform(layers, t1, t2, first_t1, f"{which}, not calibrated", twins)
    if config.thresholds == "quantile":
        t1, t2 = content["quantiles"]
        return Thresholds.uniform(layers, t1, t2, t1, "quantiles of the scores", twins)
    found = content["thresholds"]
    return Thresholds.of(found["t1"], found["t2"], f"calibrated for {content['limit']}")


def read_calibration(folder: Path, manifest: Manifest) -> dict[str, Any] | None:
    """What `python -m apex_engine.calibrate` wrote beside a checkpoint. Raises ApexError where that is damaged, or was measured
    on other twins."""
    path = folder / CALIBRATION
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["version"] != CALIBRATION_VERSION or content["twins"] != twins_of(manifest):
            raise ApexError(f"{path} belongs to other twins: calibrate again, or delete it")
        t1, t2 = content["thresholds"]["t1"], content["thresholds"]["t2"]
        numbers = [*t1, *t2, *content["quantiles"]]
        if not (len(t1) == len(t2) == len(manifest.layers) and all(isinstance(n, (int, float)) for n in numbers)):
            raise ValueError("thresholds")
        if not isinstance(content["limit"], str):
            raise ValueError("limit")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ApexError(f"{path} is damaged ({error!r}): calibrate again, or delete it") from None
    return content


def twins_of(manifest: Manifest) -> dict[str, Any]:
    """What tells the twins of a checkpoint from others."""
    return {"fingerprint": manifest.fingerprint, "options": manifest.options}
