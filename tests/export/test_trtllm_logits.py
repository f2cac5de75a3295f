"""Checkpoints of TensorRT-LLM's families, computed as its classes would: logits of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.export.decoder.reading import read_decoder
from autoshard.export.decoder.structure import Decoder
from autoshard.export.serial_graph import model_graph
from autoshard.export.to_trtllm.config import checkpoint_config
from autoshard.export.to_trtllm.families import family_of
from autoshard.export.to_trtllm.tensors import Split, check_split, rank_tensors
from trtllm_oracle import TINY, make_model
from trtllm_reader import logits

KV: dict[str, Any] = {**TINY, "num_key_value_heads": 2}
QK: dict[str, Any] = {**KV, "head_dim": 16, "rms_norm_eps": 1e-5}
MIXED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
GEMMA = {**QK, "query_pre_attn_scalar": 8, "sliding_window": 4, "final_logit_softcapping": 3.0}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
NEOX = {**TINY, "intermediate_size": 128, "hidden_act": "gelu_new"}
GPT: dict[str, Any] = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "bos_token_id": 1}

#: Name -> (model class, configuration class, options, tensor-parallel sizes).
CASES: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", KV, (1, 2)),
    "llama_yarn": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**KV, "rope_parameters": {**YARN, "rope_theta": 1e4}},
        (2,),
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", QK, (1, 2, 4)),
    "qwen3_yarn": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**QK, "rope_parameters": {**YARN, "rope_theta": 1e6, "beta_fast": 8.0}},
        (1,),
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**KV, "num_local_experts": 4}, (2,)),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**KV, **MIXED, "shared_expert_intermediate_size": 40},
        (1, 2, 4),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**QK, **MIXED, "norm_topk_prob": True},
        (1, 2, 4),
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", KV, (1, 2, 4)),
    "phi3_long": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            **KV,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                **LONG,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 3.0],
            },
        },
        (2,),
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 2.0},
        (1, 2, 4),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GEMMA, "num_hidden_layers": 3, "layer_types": LAYERS},
        (1, 2, 4),
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT, "n_embd": 32, "n_positions": 64}, (2,)),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, (1, 2, 4)),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {**GPT, "n_embd": 32, "n_positions": 64, "rotary_dim": 4, "tie_word_embeddings": False},
        (1, 2, 4),
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32},
        (1, 2, 4),
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**GPT, "hidden_size": 32}, (1, 2, 4)),
    "bloom_of_6_heads": (
        "BloomForCausalLM",
        "BloomConfig",
        {**GPT, "hidden_size": 48, "n_head": 6},
        (2,),
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", KV, (1, 2, 4)),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's, of Bloom's GELU
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model(name: str) -> None:
    """The vocabulary of 61 is no multiple of any number of ranks but 1."""
    model_class, config_class, options, sizes = CASES[name]
    model = make_model(model_class, config_class, options).eval()
    decoder = read_decoder(model_graph(model))
    ids = torch.tensor([5, 17, 60, 3, 3, 42, 8])
    with torch.no_grad():
        expected = model(ids.unsqueeze(0)).logits[0]
    for tp in sizes:
        config, ranks = checkpoint(model, decoder, tp)
        torch.testing.assert_close(logits(config, ranks, ids), expected, rtol=1e-3, atol=2e-4)


def checkpoint(
    model: Any, decoder: Decoder, tp: int
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """(config.json, the tensors of each rank), as they would be written."""
    family = family_of(decoder, model.config)
    shared = family.shares_embedding
    parallel = shared and tp > 1
    split = Split(tp, 1, torch.float32, parallel_embedding=parallel, share_embedding=shared)
    check_split(decoder, family, split)
    config = checkpoint_config(decoder, family, split, model.config, 64)
    config["windows"] = [layer.attention.window or 99 for layer in decoder.layers]
    parameters = dict(model.named_parameters())
    ranks = []
    for rank in range(tp):
        tensors = {}
        for entry in rank_tensors(decoder, family, split, rank):
            values = [parameters[piece.parameter].detach() for piece in entry.pieces]
            parts = [
                piece.take(value, (0,) * value.dim(), entry.dtype)
                for piece, value in zip(entry.pieces, values)
            ]
            whole = torch.zeros(entry.shape, dtype=entry.dtype)
            if parts:
                joined = torch.cat(parts)
                whole[: len(joined)] = joined
            tensors[entry.name] = whole
        ranks.append(tensors)
    return config, ranks
