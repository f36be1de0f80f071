"""Predictors, by the names of `Config.predictor`. A new one is a file here and a line in `PREDICTORS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from apex_engine.predict.base import Predictor
from apex_engine.predict.gate import GatePredictor
from apex_engine.predict.learned import LearnedPredictor

# Each is made of the decoder layer and the MoE block of every MoE layer.
PREDICTORS: dict[str, Callable[[list[tuple[nn.Module, nn.Module]]], Predictor]] = {
    "gate": GatePredictor,
    "norm": partial(GatePredictor, corrected=True),
    "learned": LearnedPredictor,
}
