"""The MoE layers of a model, and the parameters each is made of.

Modules with the interface of transformers' `use_experts_implementation` are the MoE layers; no code here knows a model family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from apex_engine.errors import ApexError
from apex_engine.families import layer_number
from apex_engine.kernels.layout import ExpertShape
from apex_engine.quantize.source.parameters import ExpertParameter
from apex_engine.quantize.source.shards import TensorRef

FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # dtypes an expert may have, by safetensors' names


@dataclass(frozen=True)
class MoeLayer:
    """One layer of routed experts in the source."""

    number: int
    module: str  # path of the experts module
    experts: int
    transposed: bool  # matrices stored [in, out]
    shape: ExpertShape
    parameters: dict[str, ExpertParameter]  # by the blob's names: up.weight, down.weight, up.bias, down.bias


def find_layers(
    folder: Path,
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, ExpertParameter],
    tensors: Mapping[str, TensorRef],
) -> list[MoeLayer]:
    """One for each of the experts `modules`, by path. Raises ApexError where they differ in shape, or are not understood."""
    layers = [_layer(folder, name, module, parameters, tensors) for name, module in modules.items()]
    first = layers[0]
    for layer in layers:
        if (layer.shape, layer.experts) != (first.shape, first.experts):
            raise ApexError(
                f"{layer.module} has {layer.experts} experts of {layer.shape}, {first.module} has {first.experts} of "
                f"{first.shape}: models whose MoE layers differ in shape are not supported"
            )
    if len({layer.number for layer in layers}) != len(layers):
        raise ApexError(f"{folder} has layers with two groups of routed experts: not supported")
    return layers


def _layer(
    folder: Path,
    name: str,
    module: Any,
    parameters: Mapping[str, ExpertParameter],
    tensors: Mapping[str, TensorRef],
) -> MoeLayer:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = {"up.weight": up, "down.weight": "down_proj"}
    if module.has_bias:
        names |= {"up.bias": f"{up}_bias", "down.bias": "down_proj_bias"}
    own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
    if own != set(names.values()):
        raise ApexError(f"{name} has the parameters {sorted(own)} instead of {sorted(names.values())}: not supported")
    chosen = {blob: parameters[f"{name}.{parameter}"] for blob, parameter in names.items()}
    for parameter in chosen.values():
        parameter.check_count(folder)
    experts, *down = chosen["down.weight"].shape
    hidden, intermediate = reversed(down) if module.is_transposed else down
    bias = dtype_of(folder, chosen["up.bias"], tensors) if module.has_bias else ""
    shape = ExpertShape(hidden, intermediate, module.has_gate, bias)
    return MoeLayer(layer_number(name), name, experts, module.is_transposed, shape, chosen)


def dtype_of(folder: Path, parameter: ExpertParameter, tensors: Mapping[str, TensorRef]) -> str:
    """The one dtype of the tensors that a parameter is made of, e.g. "bfloat16". Raises ApexError."""
    dtypes = {tensors[key].dtype for keys in parameter.keys.values() for key in keys}
    if len(dtypes) != 1 or not dtypes <= set(FLOATS):
        raise ApexError(
            f"{parameter.name} of {folder} has the dtype {sorted(dtypes)}: the twins are made from one float dtype, "
            f"{', '.join(FLOATS.values())}, so take the unquantized checkpoint"
        )
    return FLOATS[dtypes.pop()]
