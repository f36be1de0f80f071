"""A Hugging Face MoE checkpoint as the quantizer sees it: dense tensors to copy, and experts one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from apex_engine.errors import ApexError
from apex_engine.families import find_experts
from apex_engine.quantize.source.layers import MoeLayer, dtype_of, find_layers
from apex_engine.quantize.source.packed import UNPACKED, dequantizer
from apex_engine.quantize.source.parameters import ExpertParameter, sort_tensors
from apex_engine.quantize.source.shards import Shards, TensorRef
from apex_engine.quantize.source.skeleton import meta_model, read_config


class Source:
    """A checked checkpoint directory. Raises ApexError for everything that would not convert whole and right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_json, self.config = read_config(folder)
        self._shards = Shards(folder)
        self._model = meta_model(folder, self.config)
        modules = find_experts(self._model)
        if not modules:
            raise ApexError(
                f"{folder} ({self.config.model_type}) has no experts behind transformers' experts interface: apex-engine is for "
                "Mixture-of-Experts models built on it; a dense model gains nothing from it"
            )
        self._quantizer = dequantizer(self.config_json)
        found = sort_tensors(folder, self.tensors, self._model, modules, self._quantizer)
        self.dense, self.notes = found.dense, found.notes  # tensors copied as they are; what the user should be told
        self.layers = find_layers(folder, modules, found.parameters, self.tensors)

    @property
    def tensors(self) -> dict[str, TensorRef]:
        """All on disk, by name."""
        return self._shards.tensors

    @property
    def dense_bytes(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.dense)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the config, every tensor's name, dtype and shape, and samples of every shard's bytes."""
        sha = sha256(json.dumps(self.config_json, sort_keys=True).encode())
        self._shards.fingerprint(sha)
        return sha.hexdigest()

    @cached_property
    def expert_dtype(self) -> str:
        """The one dtype of all expert matrices, e.g. "bfloat16"; what a packed source dequantizes to."""
        if self._quantizer is not None:
            return UNPACKED
        matrices = [layer.parameters[m] for layer in self.layers for m in ("up.weight", "down.weight")]
        dtypes = {dtype_of(self.folder, parameter, self.tensors) for parameter in matrices}
        if len(dtypes) > 1:
            raise ApexError(f"the experts of {self.folder} mix the dtypes {sorted(dtypes)}: convert them to one first")
        return dtypes.pop()

    def layer(self, number: int) -> MoeLayer:
        """The one with this number in the model."""
        return next(layer for layer in self.layers if layer.number == number)

    def expert(self, layer: MoeLayer) -> Iterator[dict[str, Tensor]]:
        """The experts of a layer in order: the blob's names -> matrices `[N, K]` and biases `[N]` in the source's dtype."""
        whole = {
            name: self._assemble(parameter, 0, layer.experts)
            for name, parameter in layer.parameters.items()
            if not parameter.per_expert
        }
        for e in range(layer.experts):
            expert = {}
            for name, parameter in layer.parameters.items():
                tensor = whole[name][e] if name in whole else self._assemble(parameter, e, e + 1)[0]
                expert[name] = tensor.T.contiguous() if layer.transposed and tensor.dim() == 2 else tensor
            yield expert
        self._shards.close()

    def read(self, name: str) -> Tensor:
        """One tensor as it is on disk."""
        return self._shards.read(name)

    def _assemble(self, parameter: ExpertParameter, start: int, stop: int) -> Tensor:
        return parameter.assemble(self._shards, self._model, self.config, start, stop)
