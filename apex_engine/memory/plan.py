"""How a memory budget becomes slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import Config, parse_memory
from apex_engine.core.vocabulary import Precision
from apex_engine.errors import ApexError
from apex_engine.memory.probe import automatic_memory

# Of "auto": without a calibration and with one, by which more is served LOW. Measured: docs/runtime.md
AUTO_LOW_SHARE = {False: 0.05, True: 0.1}
LEAST_HOST_SLOTS = 4  # as many as there are workers, each of which may be filling one


@dataclass(frozen=True)
class Plan:
    """Slots of each pool under a budget; bytes everywhere."""

    experts: int  # routed experts of the whole model
    budget: int
    stride: dict[Precision, int]
    slots: dict[Precision, int]
    dense_bytes: int
    host_slots: dict[Precision, int]  # of the host tier; empty without

    @property
    def slot_bytes(self) -> int:
        return sum(self.slots[p] * self.stride[p] for p in self.slots)

    @property
    def host_bytes(self) -> int:
        return sum(n * self.stride[p] for p, n in self.host_slots.items())

    @property
    def host_holds_all(self) -> bool:
        return bool(self.host_slots) and min(self.host_slots.values()) == self.experts


def make_plan(
    config: Config,
    manifest: Manifest,
    dense_bytes: int | None = None,
    kv: int | None = 0,
    calibrated: bool = False,
) -> Plan:
    """`dense_bytes`, `kv`: of the model as it is computed, for `device_memory`; `kv` None where it is not known. `calibrated`:
    whether the thresholds are.

    Raises ApexError, with the number needed, where the budget does not hold one slot of each twin the mode uses.
    """
    total = manifest.experts * len(manifest.layers)
    dense = manifest.dense_bytes if dense_bytes is None else dense_bytes
    stride = {Precision.HIGH: manifest.high.stride, Precision.LOW: manifest.low.stride}
    used = [Precision.HIGH] if config.mode == "exact" else [Precision.HIGH, Precision.LOW]
    floor = config.low_share == "floor" and Precision.LOW in used
    least = stride[Precision.HIGH] + (stride[Precision.LOW] * (total if floor else 1) if Precision.LOW in used else 0)
    if config.device_memory is None:
        budget, rest, name = parse_memory(config.memory, total * stride[Precision.HIGH]), 0, f"memory {config.memory}"
    else:
        rest = dense + (kv or 0)
        budget = parse_memory(config.device_memory, 0) - rest
        name = f"device_memory {config.device_memory}"
    if budget < least:
        after = f" after {rest:,} for dense weights and the KV cache" if rest else ""
        raise ApexError(
            f"{name} leaves {max(budget, 0):,} bytes for experts{after}, but {'every LOW twin' if floor else 'one LOW slot'} "
            f"and one HIGH slot take {least:,}: give at least {least + rest} (that runs, slowly)"
            if Precision.LOW in used
            else f"{name} leaves {max(budget, 0):,} bytes for experts{after}, but one slot takes {least:,}: "
            f"give at least {least + rest} (that runs, slowly)"
        )
    low = 0
    if Precision.LOW in used:
        share = {"auto": AUTO_LOW_SHARE[calibrated], "floor": 1.0}.get(str(config.low_share), config.low_share)
        low = total if floor else min(total, max(1, int(budget * float(share)) // stride[Precision.LOW]))
        low = min(low, (budget - stride[Precision.HIGH]) // stride[Precision.LOW])
    high = min(total, (budget - low * stride[Precision.LOW]) // stride[Precision.HIGH])
    if low:  # what is left is less than a HIGH slot, or every HIGH twin is resident: more LOW slots
        low = min(total, (budget - high * stride[Precision.HIGH]) // stride[Precision.LOW])
    slots = {Precision.HIGH: high, Precision.LOW: low}
    return Plan(total, budget, stride, slots, dense, _host_slots(config, total, {p: stride[p] for p in used}))


def _host_slots(config: Config, total: int, stride: dict[Precision, int]) -> dict[Precision, int]:
    """As many of each twin as fit: the same share of both."""
    everything = total * sum(stride.values())
    budget = parse_memory(config.host_memory, everything)
    if not budget:
        return {}
    slots = {p: min(total, int(total * budget / everything)) for p in stride}
    if min(slots.values()) < LEAST_HOST_SLOTS and budget < everything:
        raise ApexError(
            f"host_memory {config.host_memory} is {budget:,} bytes, too few for {LEAST_HOST_SLOTS} experts of each twin: give "
            f"at least {-(-everything * LEAST_HOST_SLOTS // total)}, or 0 for no host tier"
        )
    return slots


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


def config_for(device: torch.device, **options: Any) -> Config:
    """`Config.make` for a model on `device`: "auto" is bytes then. Raises ApexError, also for a second tier where there is no
    first one apart from host memory."""
    if options.get("device_memory") == "auto":
        options["device_memory"] = automatic_memory(device)
    config = Config.make(**options)
    if device.type == "cpu" and not config.link and parse_memory(config.host_memory, 100):
        raise ApexError(
            "host_memory is a tier behind a GPU or a simulated link, and there is neither: raise memory instead"
        )
    return config
