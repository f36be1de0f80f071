"""Which tensors on disk make which parameters of the model: transformers' own checkpoint conversion says it.

Whether a checkpoint has a tensor an expert or one stacked tensor, an expert's part of a parameter can be assembled without the
others wherever the conversion allows it.

Letters: E experts of a layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from apex_engine.errors import ApexError
from apex_engine.quantize.source.shards import Shards, some


@dataclass
class ExpertParameter:
    """One parameter of an experts module and the checkpoint tensors it is made of."""

    name: str  # full name in the model
    shape: tuple[int, ...]  # [E, ...] in the model
    converter: WeightConverter | None  # None: one stacked tensor under this parameter's name
    keys: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # source pattern -> tensor names

    @property
    def per_expert(self) -> bool:
        """Whether expert e is made of the e-th tensors alone, so that it can be converted without the others."""
        if self.converter is None:
            return True
        return all(len(keys) == self.shape[0] for keys in self.keys.values()) and all(
            (isinstance(op, MergeModulelist) and op.dim == 0)
            or (isinstance(op, Concatenate) and op.dim > 0)
            or (isinstance(op, Transpose) and min(op.dim0, op.dim1) > 0)
            for op in self.converter.operations
        )

    def assemble(
        self, shards: Shards, model: PreTrainedModel, config: PretrainedConfig, start: int, stop: int
    ) -> Tensor:
        """Experts `start`..`stop`, `[stop - start, ...]` as the model has it. Raises ApexError where the tensors have another
        shape than the model's config asks for."""
        if self.converter is None:
            (key,) = self.keys[self.name]
            return shards.slice(key, start, stop)
        converter = deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys[start:stop] if self.per_expert else keys:
                converter.add_tensor(self.name, key, pattern, partial(shards.read, key))
        (tensor,) = converter.convert(self.name, model=model, config=config).values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        expected = (stop - start, *self.shape[1:])
        if tuple(tensor.shape) != expected:
            raise ApexError(
                f"{self.name} of {shards.folder} has shape {tuple(tensor.shape)}, but the model's config asks for {expected}: "
                "is a shard or an expert missing, or config.json from another model?"
            )
        return tensor

    def check_count(self, folder: Path) -> None:
        """Raises ApexError where it has tensors for some of its experts only."""
        counts = {pattern: len(keys) for pattern, keys in self.keys.items()}
        if set(counts.values()) not in ({1}, {self.shape[0]}):
            found = ", ".join(f"{count} of {pattern}" for pattern, count in counts.items())
            raise ApexError(
                f"{self.name} of {folder} has {found} instead of one for each of {self.shape[0]} experts: "
                "is a shard or an expert missing, or config.json from another model?"
            )


@dataclass
class Sorted:
    """The tensors of a checkpoint by what they are."""

    dense: list[str] = field(default_factory=list)  # names of those that are copied as they are
    parameters: dict[str, ExpertParameter] = field(default_factory=dict)  # of the experts modules, by full name
    notes: list[str] = field(default_factory=list)  # what the user should be told


def sort_tensors(
    folder: Path, names: Iterable[str], model: PreTrainedModel, modules: Container[str], quantizer: Any = None
) -> Sorted:
    """Assign every tensor on disk to the dense part or to a parameter of one of the experts `modules`.

    `quantizer`: transformers' loader of a packed source. Raises ApexError for what does not fit the model.
    """
    wanted = model.state_dict()
    mapping = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}

    result = Sorted()
    found, unexpected = set(), []
    for key in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            unexpected.append(key)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        targets = _targets(name, converter)
        found.update(targets)
        if name.rpartition(".")[0] not in modules:
            result.dense.append(key)
            continue
        if len(targets) > 1:
            raise ApexError(f"{key} holds several parameters of {name}: this family's checkpoints are not supported")
        new = ExpertParameter(name, tuple(wanted[name].shape), converter)
        result.parameters.setdefault(name, new).keys[pattern or name].append(key)
    result.notes += _refuse_misfits(folder, model, set(wanted) - found, unexpected)
    return result


def _targets(name: str, converter: WeightConverter | None) -> list[str]:
    """The parameters that a tensor goes into, one of which is `name`."""
    if converter is None:
        return [name]
    return [name.replace(converter.target_patterns[0], target) for target in converter.target_patterns]


def _refuse_misfits(folder: Path, model: PreTrainedModel, missing: set[str], unexpected: list[str]) -> list[str]:
    """What is left out, for the user to be told."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    missing -= set(model.all_tied_weights_keys)
    missing = {n for n in missing if not _ignored(n, models, "_keys_to_ignore_on_load_missing")}
    ignored = [n for n in unexpected if _ignored(n, models, "_keys_to_ignore_on_load_unexpected")]
    strange = sorted(set(unexpected) - set(ignored))
    if missing or strange:
        raise ApexError(
            f"the tensors of {folder} do not fit its config ({model.config.model_type}): "
            f"missing {some(sorted(missing))}; unexpected {some(strange)}. Nothing was written: complete the "
            "checkpoint, or use the transformers version it was made for"
        )
    return [f"left out {len(ignored)} tensors that transformers ignores too: {some(ignored)}"] if ignored else []


def _ignored(name: str, models: list[PreTrainedModel], attribute: str) -> bool:
    patterns = [pattern for model in models for pattern in getattr(model, attribute, None) or ()]
    return any(re.search(pattern, name) for pattern in patterns)
