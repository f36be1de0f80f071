"""A packed source: MXFP4, in which gpt-oss is released and has no other original. Its values are bfloat16, exactly."""

from __future__ import annotations

from typing import Any

UNPACKED = "bfloat16"  # the dtype its experts have when they are read


def dequantizer(config_json: dict[str, Any]) -> Any:
    """transformers' loader of such a checkpoint, by its config.json; None where it is not packed."""
    if not config_json.get("quantization_config"):
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    return AutoHfQuantizer.from_config({**config_json["quantization_config"], "dequantize": True}, pre_quantized=True)
