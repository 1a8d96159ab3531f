"""A tiny random model of each family that users train: two or three layers with every kind of layer that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 64
COMMON: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
MLA = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "num_key_value_heads": 4,
}
DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA2 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    "mamba_expand": 2,
}
PER_LAYER = {
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": HEAD,
    "llama": {},
    "gemma2": HEAD,
    "phi3": {},
    "glm4": HEAD,
    "cohere2": HEAD,
    "nemotron": {},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS | HEAD | {"mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "qwen3_next": EXPERTS | HEAD | DELTA | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": HEAD | DELTA,
    "qwen3_5_moe_text": EXPERTS | HEAD | DELTA | {"shared_expert_intermediate_size": 16},
    "deepseek_v2": ROUTED | MLA | {"topk_method": "greedy"},
    "deepseek_v3": ROUTED | MLA,
    "glm4_moe": ROUTED | HEAD,
    "glm4_moe_lite": ROUTED | MLA,
    "dots1": ROUTED | HEAD,
    "solar_open": ROUTED | HEAD,
    "minimax": HEAD | LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "minimax_m2": HEAD | LOCAL | {"rotary_dim": 8},
    "ernie4_5_moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": HEAD | {"num_experts": 4, "moe_topk": 2},
    "afmoe": EXPERTS | HEAD | {"num_dense_layers": 1},
    "longcat_flash": {
        **MLA,
        **HEAD,
        **{"n_routed_experts": 4, "moe_topk": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "num_layers": 1},
        "zero_expert_num": 1,
    },
    "gpt_oss": HEAD | LOCAL,
    "granitemoe": LOCAL,
    "phimoe": LOCAL,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "block_multiple_of": 8},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {
        **HEAD,
        **PER_LAYER,
        **{"laurel_rank": 4, "intermediate_size": [48, 48], "activation_sparsity_pattern": [0.0, 0.0]},
    },
    "gemma4_text": HEAD | PER_LAYER | {"global_head_dim": 16},
    "granitemoehybrid": MAMBA2 | LOCAL | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | HEAD | {"mamba_d_ssm": 64},
    "jamba": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "use_mamba_kernels": False},
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
    },
    "falcon_mamba": {"state_size": 8},
    "nemotron_h": {
        **{"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8},
        **{"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "head_dim": 8},
    },
    "zamba2": {
        **{"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4},
        **{"mamba_headdim": 8, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 16},
        **{"num_mem_blocks": 1, "adapter_rank": 4},
    },
    "olmo_hybrid": HEAD | DELTA | {"linear_num_key_heads": 4},
}


def write_family(kind: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model with random weights; float32 buffers that choose experts are random and stay float32."""
    config = transformers.AutoConfig.for_model(kind, **COMMON | FAMILIES[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        causal = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, tensor in causal.state_dict().items():
            if name.endswith("norm.weight"):  # ones would hide a norm that was not loaded
                tensor.normal_(float(tensor.mean()), 0.1)
            if "e_score_correction_bias" in name or "expert_bias" in name:
                tensor.normal_(0, 0.3)
    kept = {name: tensor.clone() for name, tensor in causal.state_dict().items() if "correction_bias" in name}
    causal.to(dtype).load_state_dict(kept, strict=False, assign=True)
    causal.save_pretrained(directory)
    return directory
