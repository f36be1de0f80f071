"""The model without its weights, as transformers builds it from a checkpoint's config."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from apex_engine.errors import ApexError, first_line


def read_config(folder: Path) -> tuple[dict[str, Any], PretrainedConfig]:
    """config.json as it is, and as transformers reads it. Raises ApexError for a model that is no source."""
    path = folder / "config.json"
    if not path.is_file():
        raise ApexError(f"{folder} has no config.json: name the directory of a Hugging Face model")
    try:
        content = json.loads(path.read_text())
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # anything may be in there
        raise ApexError(f"{path} is not a model config transformers can read: {first_line(error)}") from None
    method = (content.get("quantization_config") or {}).get("quant_method")
    if method == "apex":
        raise ApexError(f"{folder} is an apex checkpoint already: give the original model")
    if method not in (None, "mxfp4"):
        raise ApexError(
            f"{folder} is quantized already ({method}): twins are made from the original weights, never from a quantized copy. "
            "Give the 16-bit checkpoint"
        )
    return content, config


def meta_model(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    """On the device "meta"."""
    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # whatever a family makes of a strange config
        raise ApexError(
            f"{folder} is no causal language model transformers can build ({type(error).__name__}: {first_line(error)})"
        ) from None
