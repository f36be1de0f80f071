"""What of a transformers model are its routed experts: the one interface that every family has."""

from __future__ import annotations

import re

from torch import nn

from apex_engine.errors import ApexError

INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by transformers on every experts module


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The routed-experts modules of a transformers model, by module path, in the order of the layers."""
    return {name: module for name, module in model.named_modules() if all(hasattr(module, flag) for flag in INTERFACE)}


def layer_number(module: str) -> int:
    """The model's own number of the layer that a module path lies in: "model.layers.7.mlp.experts" -> 7."""
    numbers = re.findall(r"\.(\d+)\.", f".{module}.")
    if not numbers:
        raise ApexError(f"the module path {module} has no layer number: this model family is not supported")
    return int(numbers[0])
