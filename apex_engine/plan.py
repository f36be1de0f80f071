"""How a memory budget becomes slots."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from apex_engine.config import Config, parse_memory
from apex_engine.quantize.checkpoint import Manifest
from apex_engine.vocabulary import ApexError, Precision


@dataclass(frozen=True)
class Plan:
    """Slots of each pool under a budget; bytes everywhere."""

    experts: int  # routed experts of the whole model
    budget: int
    stride: dict[Precision, int]
    slots: dict[Precision, int]
    dense_bytes: int

    @property
    def slot_bytes(self) -> int:
        return sum(self.slots[p] * self.stride[p] for p in self.slots)


def make_plan(config: Config, manifest: Manifest) -> Plan:
    """Raises ApexError, with the number needed, where the budget does not hold one slot of each twin the mode uses."""
    total = manifest.experts * len(manifest.layers)
    stride = {Precision.HIGH: manifest.high.stride, Precision.LOW: manifest.low.stride}
    budget = parse_memory(config.memory, total * stride[Precision.HIGH])
    used = [Precision.HIGH] if config.mode == "exact" else [Precision.HIGH, Precision.LOW]
    least = sum(stride[p] for p in used)
    if budget < least:
        raise ApexError(
            f"memory {config.memory} is {budget:,} bytes, but one slot for each twin takes {least:,}: "
            f"give at least {least} (that runs, slowly), or a share such as 25%"
        )
    low = 0
    if Precision.LOW in used:
        low = min(total, max(1, int(budget * config.low_share) // stride[Precision.LOW]))
        low = min(low, (budget - stride[Precision.HIGH]) // stride[Precision.LOW])
    high = min(total, (budget - low * stride[Precision.LOW]) // stride[Precision.HIGH])
    if low:  # what is left is less than a HIGH slot, or every HIGH twin is resident: more LOW slots
        low = min(total, (budget - high * stride[Precision.HIGH]) // stride[Precision.LOW])
    return Plan(total, budget, stride, {Precision.HIGH: high, Precision.LOW: low}, manifest.dense_bytes)


def kv_bytes(config: PretrainedConfig, tokens: int, itemsize: int) -> int | None:
    """Bytes of the KV cache of one sequence of `tokens`, an upper bound where attention slides; None where the config does not
    say, as for layers with a recurrent state."""
    try:
        text = config.get_text_config()
        kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
        if kinds - {"full_attention", "sliding_attention", "chunked_attention", "attention"}:
            return None
        if getattr(
            text, "kv_lora_rank", None
        ):  # multi-head latent attention: the latent and the shared rotary key are cached
            width = text.kv_lora_rank + text.qk_rope_head_dim
        else:
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            width = 2 * heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        return int(text.num_hidden_layers * width * tokens * itemsize)
    except Exception:  # families whose layers differ raise errors of their own for attributes without one value
        return None
