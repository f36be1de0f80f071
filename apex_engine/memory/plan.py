"""How a memory budget becomes slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

from apex_engine.checkpoint.manifest import Manifest
from apex_engine.config import Config, parse_memory
from apex_engine.core.vocabulary import Precision
from apex_engine.errors import ApexError
from apex_engine.memory.probe import automatic_memory

# Of "auto": without a calibration and with one, by which more is served LOW. Measured: docs/runtime.md
AUTO_LOW_SHARE = {False: 0.05, True: 0.1}
STEP_BYTES = 256 << 20  # most bytes of a step's outputs before they are summed: a longer prompt goes through in pieces
LEAST_HOST_SLOTS = 4  # as many as there are workers, each of which may be filling one


@dataclass(frozen=True)
class Plan:
    """Slots of each pool under a budget; bytes everywhere."""

    experts: int  # routed experts of the whole model
    budget: int
    stride: dict[Precision, int]  # of every twin
    slots: dict[Precision, int]  # of every twin, highest first; none of those that the mode does not use
    dense_bytes: int
    kv_bytes: int | None  # of one sequence; None where it is not known
    host_slots: dict[Precision, int]  # of the host tier; empty without
    step_bytes: int = 0  # outputs of a prompt's chosen experts before they are summed, at most

    @property
    def top(self) -> Precision:
        """The highest precision."""
        return max(self.stride)

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
    step_bytes: int = 0,
) -> Plan:
    """`dense_bytes`, `kv`, `step_bytes`: of the model as it is computed, for `device_memory`; `kv` None where it is not known.
    `calibrated`: whether the thresholds are.

    Raises ApexError, with the number needed, where the budget does not hold one slot of each twin the mode uses.
    """
    total, stride = manifest.experts * len(manifest.layers), manifest.strides
    dense = manifest.dense_bytes if dense_bytes is None else dense_bytes
    *lower, top = [max(stride)] if config.mode == "exact" else list(manifest.precisions)
    floor = config.low_share == "floor" and bool(lower)
    least = stride[top] + sum(stride[p] for p in lower) * (total if floor else 1)
    rest = 0 if config.device_memory is None else dense + (kv or 0) + step_bytes
    budget = _budget(config, total * stride[top], rest)
    if budget < least:
        raise ApexError(_too_small(config, budget, least, rest, [manifest.words[p].upper() for p in lower], floor))
    slots = _slots(config, stride, top, lower, budget, total, AUTO_LOW_SHARE[calibrated])
    slots = {p: slots.get(p, 0) for p in reversed(manifest.precisions)}
    host = _host_slots(config, total, {p: stride[p] for p in (*lower, top)})
    return Plan(total, budget, stride, slots, dense, kv, host, step_bytes)


def _budget(config: Config, all_high: int, rest: int) -> int:
    """Bytes for experts. `rest`: what else `device_memory` must hold."""
    if config.device_memory is None:
        return parse_memory(config.memory, all_high)
    return parse_memory(config.device_memory, 0) - rest


def _too_small(config: Config, budget: int, least: int, rest: int, lower: list[str], floor: bool) -> str:
    name = f"memory {config.memory}" if config.device_memory is None else f"device_memory {config.device_memory}"
    after = f" after {rest:,} for dense weights and the KV cache, a step's outputs included" if rest else ""
    others = " and ".join(f"every {word} twin" if floor else f"one {word} slot" for word in lower)
    what = f"{others} and one HIGH slot take" if lower else "one slot takes"
    return (
        f"{name} leaves {max(budget, 0):,} bytes for experts{after}, but {what} {least:,}: "
        f"give at least {least + rest} (that runs, slowly)"
    )


def _slots(
    config: Config,
    stride: dict[Precision, int],
    top: Precision,
    lower: list[Precision],
    budget: int,
    total: int,
    auto: float,
) -> dict[Precision, int]:
    """Slots of each twin: the share of the lower ones among these in equal parts, the rest for the highest."""
    floor = config.low_share == "floor"
    share = auto if config.low_share == "auto" else 1.0 if floor else float(config.low_share)
    slots = dict.fromkeys(lower, 1)
    for p in lower:
        left = budget - stride[top] - sum(slots[q] * stride[q] for q in lower if q != p)
        some = total if floor else min(total, max(1, int(budget * share / len(lower)) // stride[p]))
        slots[p] = min(some, left // stride[p])
    low_bytes = sum(slots[p] * stride[p] for p in lower)
    high = min(total, (budget - low_bytes) // stride[top])
    for p in lower:  # what is left is less than a HIGH slot, or every HIGH twin is resident: more of the lower ones
        others = high * stride[top] + sum(slots[q] * stride[q] for q in lower if q != p)
        slots[p] = min(total, (budget - others) // stride[p])
    return {top: high, **{p: slots[p] for p in reversed(lower)}}


def _host_slots(config: Config, total: int, stride: dict[Precision, int]) -> dict[Precision, int]:
    """As many of each twin as fit: the same share of all."""
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


def step_bytes(config: PretrainedConfig, tokens: int) -> int:
    """Bytes of the outputs of a prompt's chosen experts at one layer before they are summed, float32 `[T, K, H]`, of a prompt of
    `tokens` (it goes through in pieces: `STEP_BYTES`); 0 where the config does not say how many a token chooses."""
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None)
    return min(tokens, tokens_a_piece(chosen, text.hidden_size)) * chosen * text.hidden_size * 4 if chosen else 0


def tokens_a_piece(chosen: int, hidden: int) -> int:
    """Tokens that go through a layer at a time, `chosen` experts each."""
    return max(1, STEP_BYTES // (4 * chosen * hidden))


def plan_model(
    config: Config, manifest: Manifest, model: PretrainedConfig, itemsize: int, calibrated: bool = False
) -> Plan:
    """`make_plan` for a model with this config that is computed in a dtype of `itemsize` bytes. Raises ApexError."""
    dense = manifest.dense_bytes * itemsize // (model.dtype.itemsize if model.dtype else itemsize)
    kv, step = kv_bytes(model, config.context, itemsize), step_bytes(model, config.context)
    return make_plan(config, manifest, dense, kv, calibrated, step)


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
