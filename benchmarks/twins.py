"""Twins made with what a calibration of plain ones recorded, and calibrated themselves."""

from __future__ import annotations

from pathlib import Path

from apex_engine.calibration.measure import calibrate
from apex_engine.calibration.search import Limit
from apex_engine.calibration.settings import Settings
from apex_engine.checkpoint.moments import Moments
from apex_engine.quantize.convert import convert
from apex_engine.quantize.options import Options
from apex_engine.quantize.source.model import Source
from apex_engine.quantize.source.names import resolve

LIMIT = Limit("kl", 0.02)


def settings(tokens: int) -> Settings:
    """Those of a calibration on so many tokens, in windows of the usual length where there are enough."""
    return Settings(tokens=tokens, length=min(Settings.length, tokens // 2))


def calibrated_twins(name: str, scratch: Path, tokens: int) -> Path:
    """The apex checkpoint of the model `name`."""
    for step in ("plain", "better"):
        moments = Moments(scratch / "plain") if step == "better" else None
        options = Options(low_method="gptq", importance=moments.identity) if moments else Options()
        convert(name, Source(resolve(name)), scratch / step, options, lambda n: None, moments)
        calibrate(scratch / step, LIMIT, settings(tokens))
    return scratch / "better"
