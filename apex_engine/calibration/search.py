"""Thresholds for a limit: tried on text, corrected until what is measured meets it.

Letters: L MoE layers, W windows, N tokens a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.core.thresholds import Profile, Thresholds, cheapest
from apex_engine.errors import ApexError
from apex_engine.eval.perplexity import Comparison, judge, window_logits

CURVE = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the limit: points of the trade-off, beside those of the search
SEARCH_ROUNDS = 4
CLOSE_ENOUGH = 0.9  # of the limit
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Limit:
    """What the thresholds may cost: "kl" in nats a token, or "perplexity" as a relative rise."""

    kind: str
    value: float

    def of(self, found: Comparison) -> float:
        return found.kl.mean().item() if self.kind == "kl" else found.change

    def __str__(self) -> str:
        return f"KL <= {self.value:g}" if self.kind == "kl" else f"perplexity +{self.value:.2%}"


class Trials:
    """Measures thresholds: `deterministic` predictions against the exact ones on the same windows."""

    def __init__(self, model: PreTrainedModel, rows: Tensor, batch: int) -> None:
        self._model, self._engine, self._rows, self._batch = model, model.apex, rows, batch
        self._truth = [window_logits(model, some).cpu() for some in rows.split(batch)]

    def measure(self, thresholds: Thresholds, advance: Advance = lambda n: None) -> tuple[Comparison, dict[str, Any]]:
        """The comparison, and the engine's ledger of it."""
        self._engine.decide("deterministic", thresholds)
        self._engine.reset_stats()
        parts = []
        for some, truth in zip(self._rows.split(self._batch), self._truth, strict=True):
            parts.append(judge(some, truth, window_logits(self._model, some)))
            advance(len(some))
        return Comparison.joined(parts), self._engine.stats()

    def __len__(self) -> int:
        return len(self._rows)


def sensitivities(trials: Trials, profile: Profile, advance: Advance) -> np.ndarray:
    """KL by damage of each layer, `[L]`: measured with all of a layer's experts LOW, and those of no other."""
    layers = len(profile.calls)
    result = np.zeros(layers)
    for layer in range(layers):
        t1 = tuple(-1.0 if i == layer else 1.0 for i in range(layers))
        found, _ = trials.measure(Thresholds.of(t1, (1.0,) * layers), advance)
        result[layer] = max(found.kl.mean().item(), 0.0) / profile.low_error[layer].sum()
    return result


def search(
    trials: Trials, profile: Profile, sensitivity: np.ndarray, manifest: Manifest, limit: Limit, advance: Advance
) -> tuple[Thresholds, dict[str, Any], list[dict[str, Any]]]:
    """The thresholds that save most within the limit, their point of the curve, and the whole curve, by rising KL."""
    points: list[tuple[float, Thresholds, dict[str, Any]]] = []
    low, high = (twin.layout.stride for twin in manifest.twins)
    correction = 1.0  # of the limit, to the KL that is estimated: layers do not quite add up

    def attempt(goal: float) -> float:
        """Thresholds estimated to reach `goal`, measured: the share of `goal` that came out."""
        thresholds, _ = cheapest(profile, sensitivity, high, low, goal * correction)
        found, stats = trials.measure(thresholds, advance)
        reached = limit.of(found)
        calls, mass = stats["share_of_calls"], stats["share_of_gate_mass"]
        point = {
            **found.summary(),
            "share_low": calls["low"],
            "share_skip": calls["skip"],
            "gate_mass_low": mass["low"],
            "gate_mass_skip": mass["skip"],
            "t1": list(thresholds.t1),
            "t2": list(thresholds.t2),
        }
        points.append((reached, thresholds, point))
        return reached / goal

    for _ in range(SEARCH_ROUNDS):
        share = attempt(limit.value)
        if CLOSE_ENOUGH <= share <= 1.0:
            break
        correction *= min(max((1 + CLOSE_ENOUGH) / 2 / max(share, 1e-3), 0.2), 5.0)
    for times in CURVE:
        if times != 1.0:
            attempt(limit.value * times)
    met = [entry for entry in points if entry[0] <= limit.value]
    if not met:
        raise ApexError(f"no thresholds meet {limit} with these twins: allow more, or make better LOW twins")
    best = max(met, key=lambda entry: saved_share(entry[2], manifest))
    curve = sorted((point for *_, point in points), key=lambda point: point["kl"])
    return best[1], best[2], curve


def saved_share(point: dict[str, Any], manifest: Manifest) -> float:
    """Of the bytes of all HIGH twins, if nothing is resident."""
    low, high = (twin.layout.stride for twin in manifest.twins)
    return float(point["share_low"] * (1 - low / high) + point["share_skip"])
