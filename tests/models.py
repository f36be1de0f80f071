"""Tiny random models of the families, saved as their users would find them: written by transformers' own save_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64, "norm_topk_prob": False},
    "deepseek_v2": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
    },
    # hidden == intermediate: the orientation of down_proj cannot be read from its shape
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 16},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64},
}


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model whose experts differ enough that a swapped or skipped one shows in the logits."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "bias" in name:
                tensor.normal_(0, 0.1)
            else:
                tensor.normal_(0, 0.15)
    return model.to(dtype)


def save_model(
    folder: Path, family: str = "mixtral", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any
) -> Path:
    """`folder`, holding the random model in `dtype`."""
    make_model(family, dtype, seed, **changes).save_pretrained(folder)
    return folder
