"""Tiny models of families that TensorRT-LLM has checkpoints of."""

from __future__ import annotations

from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FALCON: dict[str, Any] = {k: v for k, v in TINY.items() if k != "intermediate_size"}

#: Name -> (model class, configuration class, options).
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TINY, "num_key_value_heads": 2}),
    "llama_biased": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**TINY, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**TINY, "num_key_value_heads": 2}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TINY, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**TINY, "num_key_value_heads": 2}),
    "gemma": (
        "GemmaForCausalLM",
        "GemmaConfig",
        {**TINY, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 61,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "falcon_7b": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": True}),
    "falcon_40b": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "falcon_biased": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "multi_query": False, "bias": True, "parallel_attn": False},
    ),
}


def make(name: str, seed: int = 0) -> Any:
    """A tiny model of MODELS."""
    return make_model(*MODELS[name], seed)


def make_model(model: str, config: str, options: dict[str, Any], seed: int = 0) -> Any:
    """A tiny model whose every parameter is random: no bias is zero and no norm is one."""
    import transformers

    torch.manual_seed(seed)
    built = getattr(transformers, model)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.2)
    built.config.use_cache = False
    return built
