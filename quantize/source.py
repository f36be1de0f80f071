"""A Hugging Face MoE checkpoint as the quantizer sees it: dense tensors to copy, and experts one by one.

No code here knows a model family. The model is built without weights ("meta"), its modules with the interface of
`use_experts_implementation` are the MoE layers, and transformers' own checkpoint conversion maps the names on disk to their
parameters, whether a checkpoint has a tensor an expert or one stacked tensor.

Letters: E experts of a layer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
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
from apex_engine.families import find_experts, layer_number
from apex_engine.kernels.layout import ExpertShape

ALIASES = {
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "phi-moe": "microsoft/Phi-3.5-MoE-instruct",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "olmoe": "allenai/OLMoE-1B-7B-0924-Instruct",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "tiny": str(Path(__file__).resolve().parent.parent / "models" / "tiny-mixtral"),
}
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # dtypes an expert may have, by safetensors' names


def resolve(source: str) -> Path:
    """The local directory of an alias, a directory or a hub id (downloaded). Raises ApexError."""
    path = Path(source).expanduser()
    if path.is_dir():
        if source in ALIASES:
            raise ApexError(f"{source} is a directory here and an alias too: write ./{source} or {ALIASES[source]}")
        return path
    if path.exists():
        raise ApexError(f"{source} is a file: name the directory that holds config.json and the *.safetensors")
    name = ALIASES.get(source, source)
    if source == "tiny":
        if not Path(name).is_dir():
            raise ApexError("the bundled model comes with a checkout of the repository only: name another model")
        return Path(name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        near = get_close_matches(source, ALIASES, n=1)
        hint = f"did you mean {near[0]}?" if near else "check the path."
        raise ApexError(
            f"{source} is no directory, no hub id (owner/name) and no alias: {hint} Aliases are {', '.join(ALIASES)}"
        )
    return _download(source, name)


def _download(source: str, repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
    try:
        return Path(
            snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["original/*", "consolidated*", "metal/*"])
        )
    except HfHubHTTPError as error:
        raise ApexError(f"the hub refused {repo}: {str(error).splitlines()[0]}") from None
    except Exception:  # the client's network errors share no base class
        at = "" if source == repo else f" (alias of {repo})"
        raise ApexError(
            f"{source}{at} is no local directory, and the hub could not be reached: "
            "go online, or download it elsewhere and give its directory"
        ) from None


@dataclass(frozen=True)
class TensorRef:
    """One tensor on disk."""

    shard: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * int(re.findall(r"\d+", self.dtype)[0]) // 8 if self.dtype != "BOOL" else numel


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


@dataclass(frozen=True)
class MoeLayer:
    number: int
    module: str  # path of the experts module
    experts: int
    transposed: bool  # matrices stored [in, out]
    shape: ExpertShape
    parameters: dict[str, ExpertParameter]  # by the blob's names: up.weight, down.weight, up.bias, down.bias


class Source:
    """A checked checkpoint directory. Raises ApexError for everything that would not convert whole and right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_json, self.config = _read_config(folder)
        self.tensors = _read_shards(folder)
        self.notes: list[str] = []  # what the user should be told
        self.dense: list[str] = []  # names of the tensors that are copied as they are
        self._model = _meta_model(folder, self.config)
        self._open: dict[Path, Any] = {}
        modules = find_experts(self._model)
        if not modules:
            raise ApexError(
                f"{folder} ({self.config.model_type}) has no experts behind transformers' experts interface: apex-engine is for "
                "Mixture-of-Experts models built on it; a dense model gains nothing from it"
            )
        self.layers = self._layers(modules, self._sort_tensors(modules))

    @property
    def dense_bytes(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.dense)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the config, every tensor's name, dtype and shape, and samples of every shard's bytes."""
        sha = hashlib.sha256(json.dumps(self.config_json, sort_keys=True).encode())
        for name, ref in sorted(self.tensors.items()):
            sha.update(f"{name} {ref.dtype} {ref.shape} {ref.shard.name}\n".encode())
        for shard in sorted({ref.shard for ref in self.tensors.values()}):
            size = shard.stat().st_size
            with shard.open("rb") as file:
                for i in range(64):  # 64 places of 4 KiB: two models of one family differ in some of them
                    file.seek(size * i // 64)
                    sha.update(file.read(4096))
        return sha.hexdigest()

    def expert(self, layer: MoeLayer) -> Iterator[dict[str, Tensor]]:
        """The experts of a layer in order: the blob's names -> matrices `[N, K]` and biases `[N]` in the source's dtype."""
        whole = {
            name: self._convert(parameter, 0, layer.experts)
            for name, parameter in layer.parameters.items()
            if not parameter.per_expert
        }
        for e in range(layer.experts):
            expert = {}
            for name, parameter in layer.parameters.items():
                tensor = whole[name][e] if name in whole else self._convert(parameter, e, e + 1)[0]
                expert[name] = tensor.T.contiguous() if layer.transposed and tensor.dim() == 2 else tensor
            yield expert

    def read(self, name: str) -> Tensor:
        """One tensor as it is on disk."""
        return self._guarded(self.tensors[name].shard, lambda shard: shard.get_tensor(name))

    def close(self) -> None:
        self._open.clear()  # safetensors files have no close of their own

    def _guarded(self, path: Path, read: Any) -> Any:
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return read(self._open[path])
        except (SafetensorError, OSError) as error:
            raise ApexError(f"{path} cannot be read ({error}): download it again") from None

    def _slice(self, name: str, start: int, stop: int) -> Tensor:
        return self._guarded(self.tensors[name].shard, lambda shard: shard.get_slice(name)[start:stop])

    def _convert(self, parameter: ExpertParameter, start: int, stop: int) -> Tensor:
        """Experts `start`..`stop` of a parameter, `[stop - start, ...]` as the model has it."""
        if parameter.converter is None:
            (key,) = parameter.keys[parameter.name]
            return self._slice(key, start, stop)
        converter = deepcopy(parameter.converter)
        for pattern, keys in parameter.keys.items():
            for key in keys[start:stop] if parameter.per_expert else keys:
                converter.add_tensor(parameter.name, key, pattern, partial(self.read, key))
        (tensor,) = converter.convert(parameter.name, model=self._model, config=self.config).values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        expected = (stop - start, *parameter.shape[1:])
        if tuple(tensor.shape) != expected:
            raise ApexError(
                f"{parameter.name} of {self.folder} has shape {tuple(tensor.shape)}, but the model's config asks for {expected}: "
                "is a shard or an expert missing, or config.json from another model?"
            )
        return tensor

    def _sort_tensors(self, modules: dict[str, nn.Module]) -> dict[str, ExpertParameter]:
        """Assign every tensor on disk to the dense part or to an expert parameter; refuse what does not fit the model."""
        wanted = self._model.state_dict()
        mapping = get_model_conversion_mapping(self._model, hf_quantizer=_dequantizer(self.config_json))
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}

        parameters: dict[str, ExpertParameter] = {}
        found, unexpected = set(), []
        for key in sorted(self.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, self._model.base_model_prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = key, None
            if name not in wanted:
                unexpected.append(key)
                continue
            converter = by_pattern[pattern] if pattern is not None else None
            targets = (
                [name]
                if converter is None
                else [name.replace(converter.target_patterns[0], t) for t in converter.target_patterns]
            )
            found.update(targets)
            if name.rpartition(".")[0] in modules:
                if len(targets) > 1:
                    raise ApexError(
                        f"{key} holds several parameters of {name}: this family's checkpoints are not supported"
                    )
                parameter = parameters.setdefault(name, ExpertParameter(name, tuple(wanted[name].shape), converter))
                parameter.keys[pattern or name].append(key)
            else:
                self.dense.append(key)
        self._refuse_misfits(set(wanted) - found, unexpected)
        return parameters

    def _refuse_misfits(self, missing: set[str], unexpected: list[str]) -> None:
        models = [module for module in self._model.modules() if isinstance(module, PreTrainedModel)]
        missing -= set(self._model.all_tied_weights_keys)
        missing = {n for n in missing if not _ignored(n, models, "_keys_to_ignore_on_load_missing")}
        ignored = [n for n in unexpected if _ignored(n, models, "_keys_to_ignore_on_load_unexpected")]
        strange = sorted(set(unexpected) - set(ignored))
        if missing or strange:
            raise ApexError(
                f"the tensors of {self.folder} do not fit its config ({self.config.model_type}): "
                f"missing {_some(sorted(missing))}; unexpected {_some(strange)}. Nothing was written: complete the "
                "checkpoint, or use the transformers version it was made for"
            )
        if ignored:
            self.notes.append(f"left out {len(ignored)} tensors that transformers ignores too: {_some(ignored)}")

    def _layers(self, modules: dict[str, nn.Module], parameters: dict[str, ExpertParameter]) -> list[MoeLayer]:
        layers = [self._layer(name, module, parameters) for name, module in modules.items()]
        first = layers[0]
        for layer in layers:
            if (layer.shape, layer.experts) != (first.shape, first.experts):
                raise ApexError(
                    f"{layer.module} has {layer.experts} experts of {layer.shape}, {first.module} has {first.experts} of "
                    f"{first.shape}: models whose MoE layers differ in shape are not supported"
                )
        if len({layer.number for layer in layers}) != len(layers):
            raise ApexError(f"{self.folder} has layers with two groups of routed experts: not supported")
        return layers

    def _layer(self, name: str, module: Any, parameters: dict[str, ExpertParameter]) -> MoeLayer:
        up = "gate_up_proj" if module.has_gate else "up_proj"
        names = {"up.weight": up, "down.weight": "down_proj"}
        if module.has_bias:
            names |= {"up.bias": f"{up}_bias", "down.bias": "down_proj_bias"}
        own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
        if own != set(names.values()):
            raise ApexError(
                f"{name} has the parameters {sorted(own)} instead of {sorted(names.values())}: not supported"
            )
        chosen = {blob: parameters[f"{name}.{parameter}"] for blob, parameter in names.items()}
        for parameter in chosen.values():
            self._check_count(parameter)
        experts, *down = chosen["down.weight"].shape
        hidden, intermediate = reversed(down) if module.is_transposed else down
        bias = self._dtype(chosen["up.bias"]) if module.has_bias else ""
        shape = ExpertShape(hidden, intermediate, module.has_gate, bias)
        return MoeLayer(layer_number(name), name, experts, module.is_transposed, shape, chosen)

    def _check_count(self, parameter: ExpertParameter) -> None:
        counts = {pattern: len(keys) for pattern, keys in parameter.keys.items()}
        if set(counts.values()) not in ({1}, {parameter.shape[0]}):
            found = ", ".join(f"{count} of {pattern}" for pattern, count in counts.items())
            raise ApexError(
                f"{parameter.name} of {self.folder} has {found} instead of one for each of {parameter.shape[0]} experts: "
                "is a shard or an expert missing, or config.json from another model?"
            )

    @cached_property
    def expert_dtype(self) -> str:
        """The one dtype of all expert matrices, e.g. "bfloat16"; what a packed source dequantizes to."""
        if _dequantizer(self.config_json) is not None:
            return "bfloat16"
        dtypes = {self._dtype(layer.parameters[m]) for layer in self.layers for m in ("up.weight", "down.weight")}
        if len(dtypes) > 1:
            raise ApexError(f"the experts of {self.folder} mix the dtypes {sorted(dtypes)}: convert them to one first")
        return dtypes.pop()

    def _dtype(self, parameter: ExpertParameter) -> str:
        dtypes = {self.tensors[key].dtype for keys in parameter.keys.values() for key in keys}
        if len(dtypes) != 1 or not dtypes <= set(FLOATS):
            raise ApexError(
                f"{parameter.name} of {self.folder} has the dtype {sorted(dtypes)}: the twins are made from one float dtype, "
                f"{', '.join(FLOATS.values())}, so take the unquantized checkpoint"
            )
        return FLOATS[dtypes.pop()]


def _read_config(folder: Path) -> tuple[dict[str, Any], PretrainedConfig]:
    path = folder / "config.json"
    if not path.is_file():
        raise ApexError(f"{folder} has no config.json: name the directory of a Hugging Face model")
    try:
        content = json.loads(path.read_text())
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # anything may be in there
        raise ApexError(f"{path} is not a model config transformers can read: {str(error).splitlines()[0]}") from None
    method = (content.get("quantization_config") or {}).get("quant_method")
    if method == "apex":
        raise ApexError(f"{folder} is an apex checkpoint already: give the original model")
    if method not in (None, "mxfp4"):
        raise ApexError(
            f"{folder} is quantized already ({method}): twins are made from the original weights, never from a quantized copy. "
            "Give the 16-bit checkpoint"
        )
    return content, config


def _dequantizer(config_json: dict[str, Any]) -> Any:
    """transformers' loader of an MXFP4 checkpoint (gpt-oss has no other original), which yields exact bfloat16; else None."""
    if not config_json.get("quantization_config"):
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    return AutoHfQuantizer.from_config({**config_json["quantization_config"], "dequantize": True}, pre_quantized=True)


def _meta_model(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # whatever a family makes of a strange config
        raise ApexError(
            f"{folder} is no causal language model transformers can build ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from None


def _read_shards(folder: Path) -> dict[str, TensorRef]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"  # takes precedence over an index, as in transformers
    listed: dict[str, str] = {}
    if index.is_file() and not single.is_file():
        try:
            listed = json.loads(index.read_text())["weight_map"]
            shards = sorted({folder / name for name in listed.values()})
            if not shards:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ApexError(f"{index} is damaged: download it again") from None
    else:
        shards = [single]
    if not shards[0].is_file() and not listed:
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        if pickles:
            raise ApexError(
                f"{folder} has only pickled weights ({pickles[0]}), which can run code when read: convert it with "
                "transformers' save_pretrained on a machine you trust, or take a safetensors revision"
            )
        raise ApexError(
            f"{folder} has no model.safetensors and no model.safetensors.index.json: name a model's directory"
        )
    tensors: dict[str, TensorRef] = {}
    for shard in shards:
        if not shard.is_file():
            raise ApexError(f"{shard} is missing, though {index.name} lists it: complete the download")
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                    part = file.get_slice(name)
                    tensors[name] = TensorRef(shard, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ApexError(f"{shard} is damaged or cut short ({error}): download it again") from None
    absent = sorted(set(listed) - set(tensors))
    if absent:
        raise ApexError(f"{index} lists tensors that are in none of its shards: {_some(absent)}: complete the download")
    return tensors


def _ignored(name: str, models: list[PreTrainedModel], attribute: str) -> bool:
    patterns = [pattern for model in models for pattern in getattr(model, attribute, None) or ()]
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
