"""Makes `apex` a quantization method of transformers, so that `from_pretrained` on an apex checkpoint returns the model."""

from __future__ import annotations

import inspect
import re
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from apex_engine.checkpoint.calibration import resolve
from apex_engine.checkpoint.manifest import MANIFEST, Manifest, guard_name
from apex_engine.config import DTYPES, Config
from apex_engine.errors import ApexError, first_line
from apex_engine.families import find_experts
from apex_engine.memory.plan import config_for, plan_model
from apex_engine.memory.probe import parse_device
from apex_engine.predict import PREDICTORS
from apex_engine.runtime.build import Progress
from apex_engine.runtime.engine import Engine
from apex_engine.runtime.experts import ApexExperts


def load(
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model of an apex checkpoint. `options` are those of `Config`; `dtype` defaults to the checkpoint's own.
    `progress(what, done, total)` is told of what takes long.

    `model.apex` is the `Engine`: `model.apex.stats()`. Raises ApexError for an unfinished or foreign checkpoint, an unknown
    option, a budget that is too small.
    """
    device = parse_device(str(device))
    if dtype not in (None, *DTYPES, *(getattr(torch, name) for name in DTYPES[1:])):
        raise ApexError(f"dtype {dtype} is none to compute in: choose from {', '.join(DTYPES)}")
    options = vars(config_for(device, **options))
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not (folder / MANIFEST).is_file():
        if not folder.is_dir():
            raise ApexError(
                f"{folder} is no directory: name an apex checkpoint made by `python -m apex_engine.quantize`"
            )
        Manifest.read(folder)
    config = read_config(folder)
    config.quantization_config = {**config.quantization_config, "runtime": options}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype or "auto").to(device)
    model.apex.prepare(model.device, model.dtype, progress)
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """The config.json of an apex checkpoint. Raises ApexError where it is not one."""
    try:
        config = AutoConfig.from_pretrained(folder)
        method = config.quantization_config["quant_method"]
    except Exception as error:  # anything may be in there
        raise ApexError(f"{folder}/config.json cannot be read ({first_line(error)}): quantize again") from None
    if method != "apex":
        raise ApexError(f"{folder}/config.json is that of another checkpoint ({method}): quantize again")
    return config


@register_quantization_config("apex")
class ApexQuantizationConfig(QuantizationConfigMixin):
    """The `quantization_config` of an apex checkpoint's config.json; `runtime` carries the options of `load` and is not saved."""

    def __init__(self, runtime: dict[str, Any] | None = None, **saved: Any) -> None:
        self.quant_method = "apex"
        self.runtime = runtime or {}
        self.saved = saved

    def to_dict(self) -> dict[str, Any]:
        return {**self.saved, "quant_method": "apex"}


@register_quantizer("apex")
class ApexQuantizer(HfQuantizer):
    """Replaces the experts modules before the dense weights are loaded, and hands them the engine afterwards."""

    requires_calibration = False

    def __init__(self, quantization_config: ApexQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # What transformers loads is the dense part, which is as in the source: the ordinary rules for dtypes hold for it
        # (as "pre-quantized", transformers 5.17 would leave every renamed tensor in the dtype it has on disk).
        self.pre_quantized = False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files:
            raise ApexError("an apex checkpoint is loaded from its directory, not from a state dict")
        folder, options = Path(checkpoint_files[0]).parent, Config.make(**self.quantization_config.runtime)
        itemsize = torch.get_default_dtype().itemsize  # transformers has set it to the model's
        manifest = Manifest.read(folder)
        calibrated = resolve(options, folder, manifest).calibrated
        plan = plan_model(options, manifest, read_config(folder), itemsize, calibrated)
        self._engine = Engine.open(folder, options, plan)
        modules = find_experts(model)
        self._experts = list(modules)
        layers = self._engine.manifest.layers
        if [name.removeprefix("model.") for name in modules] != [
            layer.module.removeprefix("model.") for layer in layers
        ]:
            raise ApexError(
                "the MoE layers of the model are not those of the checkpoint: quantize again with this transformers"
            )
        for index, (name, module) in enumerate(modules.items()):
            model.set_submodule(name, ApexExperts(module, index))
        guard = re.escape(guard_name(layers[0].module))
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), guard}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        for module in model.modules():
            if isinstance(module, ApexExperts):
                module.engine = self._engine
        model.requires_grad_(False)
        model.apex = self._engine
        if self._engine.config.prefetch:
            layers = []
            for name in self._experts:
                block = name.rpartition(".")[0]
                layers.append((model.get_submodule(block.rpartition(".")[0]), model.get_submodule(block)))
            self._engine.predictor = PREDICTORS[self._engine.config.predictor](layers)
            if self._engine.predictor.reads_embeddings:
                model.get_input_embeddings().register_forward_hook(lambda _, __, out: self._engine.embedded(out))
        _watch(model, self._engine)
        return model

    def is_serializable(self, **_: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _watch(model: PreTrainedModel, engine: Engine) -> None:
    """Tell the engine of each forward pass.

    A pass without past begins a sequence (so does every pass of a generation without cache). A pass of one token on a past is
    decoding, every other is prefill, the checks of assisted decoding included.
    """
    signature = inspect.signature(model.forward)
    passes: dict[int, tuple[str, int, float]] = {}  # thread -> its pass under way

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**kwargs, **signature.bind_partial(*args).arguments}
        ids = given.get("input_ids")
        tokens = ids if ids is not None else given.get("inputs_embeds")
        if tokens is None:
            return  # the model says what is missing
        batch, length = tokens.shape[:2]
        # By type: the argument has been called `past_key_values` and `cache` by different versions of transformers.
        past = next((value for value in given.values() if isinstance(value, Cache)), None)
        new = past is None or past.get_seq_length() == 0
        phase = "decode" if length == 1 and not new else "prefill"
        engine.begin_pass(phase, batch * length, new)
        passes[threading.get_ident()] = phase, batch * length, time.perf_counter()

    def after(*_: Any) -> None:
        begun = passes.pop(threading.get_ident(), None)
        if begun:  # not where `before` itself failed
            phase, tokens, start = begun
            engine.end_pass(phase, tokens, time.perf_counter() - start)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)
