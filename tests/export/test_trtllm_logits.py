"""Checkpoints of TensorRT-LLM's families, computed as its classes would: logits of the model.

Fields are those of its converters, a list for each family.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import autoshard
from autoshard.export import ExportError
from autoshard.export.decoder.reading import read_decoder
from autoshard.export.decoder.structure import Decoder
from autoshard.export.serial_graph import model_graph
from autoshard.export.to_trtllm.families import family_of
from autoshard.export.to_trtllm.tensors import Split, check_split
from trtllm_oracle import MODELS, TINY, make_model
from trtllm_reader import UnreadTensors, logits

# torch's own, where it traces Bloom's GELU
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")

KV: dict[str, Any] = {**TINY, "num_key_value_heads": 2}
QK: dict[str, Any] = {**KV, "head_dim": 16, "rms_norm_eps": 1e-5}
MIXED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
GEMMA = {**QK, "query_pre_attn_scalar": 8, "sliding_window": 4, "final_logit_softcapping": 3.0}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
NEOX = {**TINY, "intermediate_size": 128, "hidden_act": "gelu_new"}
GPT: dict[str, Any] = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "bos_token_id": 1}

#: Name -> (model class, configuration class, options, tensor-parallel sizes). Those of MODELS are
#: cut into stages too, where two ranks have a part each.
CASES: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    **{name: (*model, (1, 2, 4)) for name, model in MODELS.items()},
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


IDS = torch.tensor([5, 17, 60, 3, 3, 42, 8])
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM", "hidden_act": "silu", "num_key_value_heads": 2},
    "llama_biased": {"attn_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama_tied": {"head_size": 16, "rotary_embedding_dim": 16, "share_embedding_table": False},
    "mistral": {"architecture": "MistralForCausalLM", "max_position_embeddings": 64},
    "mixtral": {"architecture": "MixtralForCausalLM", "hidden_act": "swiglu"},
    "qwen2": {"qwen_type": "qwen2", "attn_bias": True, "tie_word_embeddings": False},
    "gemma": {"share_embedding_table": True, "hidden_act": "gelu_pytorch_tanh", "head_size": 16},
    "gpt2": {"position_embedding_type": "learned_absolute", "hidden_act": "gelu_new"},
    "falcon_7b": {"parallel_attention": True, "num_key_value_heads": 1, "bias": False},
    "falcon_40b": {"new_decoder_architecture": True, "num_key_value_heads": 2},
    "falcon_biased": {"parallel_attention": False, "bias": True, "num_key_value_heads": 4},
    "llama_yarn": {"rotary_base": 1e4, "rotary_scaling": YARN},
    "qwen3": {"qwen_type": "qwen3", "attn_bias": False, "head_size": 16, "seq_length": 8192},
    "qwen2_moe": {
        "qwen_type": "qwen2_moe",
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "intermediate_size": 48,
        "hidden_act": "swiglu",
    },
    "qwen3_moe": {"qwen_type": "qwen3_moe", "moe_shared_expert_intermediate_size": 0},
    "phi3": {"rotary_pct": 1.0, "hidden_act": "swiglu", "tie_word_embeddings": False},
    "phi3_long": {
        "rotary_pct": 0.5,
        "position_embedding_type": "long_rope",
        "original_max_position_embeddings": 16,
        "longrope_scaling_long_factors": [2.0, 3.0],
        "rotary_scaling": None,
    },
    "gemma2": {
        "inter_layernorms": True,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "_sliding_window_pattern": 3,
        "rope_local_base_freq": 1e4,
        "rotary_base": 1e6,
        "sliding_window": 4,
    },
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 1e4, "rotary_embedding_dim": 2},
    "gptj": {"rotary_dim": 4, "position_embedding_type": "rope_gptj", "hidden_act": "gelu"},
    "opt": {"do_layer_norm_before": True, "max_position_embeddings": 64, "hidden_act": "relu"},
    "bloom": {"position_embedding_type": "alibi", "hidden_act": "gelu", "intermediate_size": 128},
    "starcoder2": {"gpt_variant": "starcoder2", "bias": True, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """The vocabulary of 61 is no multiple of any number of ranks but 1."""
    model, decoder = read(name)
    with torch.no_grad():
        expected = model(IDS.unsqueeze(0)).logits[0]
    for tp in CASES[name][3]:
        pp = 2 if tp == 2 and name in MODELS and name != "gemma" else 1
        config, ranks = checkpoint(model, decoder, tmp_path / f"tp{tp}", tp, pp)
        # TensorRT-LLM's GELU is the one by tanh, Falcon's is not
        atol = 2e-2 if name.startswith("falcon") else 2e-4
        torch.testing.assert_close(logits(config, ranks, IDS), expected, rtol=1e-3, atol=atol)
        fields = FIELDS.get(name, {})
        assert {key: config[key] for key in fields} == fields
        assert config["mapping"]["moe_tp_size"] == tp


#: (case, field of config.json, a wrong value)
FAULTS = [
    ("llama_yarn", "rotary_scaling", {**YARN, "mscale": 2.0}),
    ("qwen3", "qwen_type", "qwen2"),
    ("qwen3_moe", "moe", {"top_k": 2, "normalization_mode": 0}),
    ("phi3_long", "rotary_pct", 1.0),
    ("gemma2", "attn_logit_softcapping", None),
    ("gemma2", "query_pre_attn_scalar", 16),
    ("gemma3", "_sliding_window_pattern", 2),
    ("gptj", "position_embedding_type", "rope_gpt_neox"),
    ("bloom", "position_embedding_type", "learned_absolute"),
]


@pytest.mark.parametrize(("name", "field", "wrong"), FAULTS)
def test_a_wrong_field_shows_in_the_logits(
    name: str, field: str, wrong: Any, tmp_path: Path
) -> None:
    """The evaluation reads each of these fields, so that equal logits prove them."""
    model, decoder = read(name)
    config, ranks = checkpoint(model, decoder, tmp_path / "out")
    right = logits(config, ranks, IDS)
    assert config[field] != wrong
    if name == "phi3_long":  # as many factors as the wrong part needs
        config["longrope_scaling_short_factors"] *= 2
    try:
        found = logits({**config, field: wrong}, ranks, IDS)
    except UnreadTensors:
        return  # that shows it too
    assert float((found - right).abs().max()) > 1e-2


def test_mixtures_say_how_weights_are_normalised(tmp_path: Path) -> None:
    modes = {}
    for name in ("qwen2_moe", "qwen3_moe", "mixtral"):
        moe = checkpoint(*read(name), tmp_path / name)[0]["moe"]
        assert (moe["num_experts"], moe["top_k"]) == (4, 2)
        modes[name] = moe["normalization_mode"]
    assert modes == {"qwen2_moe": 0, "qwen3_moe": 1, "mixtral": 1}


@pytest.mark.parametrize("name", ["phi3", "gemma2", "gptj", "opt", "bloom", "gpt_neox"])
def test_families_without_pipeline_stages(name: str) -> None:
    model, decoder = read(name)
    family = family_of(decoder, model.config)
    split = Split(1, 2, torch.float32, parallel_embedding=False, share_embedding=name == "gemma2")
    with pytest.raises(ExportError, match="pp 2: TensorRT-LLM"):
        check_split(decoder, family, split)


#: Name -> (model class, configuration class, options, what the error says).
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "a multiplier of residuals": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {**KV, "residual_multiplier": 0.5},
        "does not read the plain sum",
    ),
    "biases that Qwen3 has not there": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**QK, "attention_bias": True},
        "TensorRT-LLM's Qwen3ForCausalLM is fixed .*: biases is attention, not none",
    ),
    "a width that GPT-NeoX has not there": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**NEOX, "intermediate_size": 48},
        "MLP of 4 x hidden is False, not True",
    ),
    "an MLP after attention": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**NEOX, "use_parallel_residual": False},
        "MLP beside attention is False, not True",
    ),
    "scaling of some layers": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **GEMMA,
            "layer_types": LAYERS[1:],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
        "gemma3 has no rotary scaling of type linear",
    ),
    "norms after the sums": (
        "OPTForCausalLM",
        "OPTConfig",
        {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        "norms come after the sums",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_has_not(name: str, tmp_path: Path) -> None:
    model_class, config_class, options, match = REFUSED[name]
    model = make_model(model_class, config_class, options).eval()
    with pytest.raises(ExportError, match=match):
        autoshard.export.trtllm(model, tmp_path / "out", mesh={"tp": 1})


@cache
def read(name: str) -> tuple[Any, Decoder]:
    """The model of a case, and its decoder."""
    model_class, config_class, options, _ = CASES[name]
    model = make_model(model_class, config_class, options).eval()
    return model, read_decoder(model_graph(model))


def checkpoint(
    model: Any, decoder: Decoder, path: Path, tp: int = 1, pp: int = 1
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """(config.json, the tensors of each rank), as they are written; four ranks split the table."""
    with pytest.MonkeyPatch.context() as patch:  # the same for every mesh: traced once
        patch.setattr("autoshard.export.to_trtllm.checkpoint.model_graph", lambda *_: None)
        patch.setattr("autoshard.export.to_trtllm.checkpoint.read_decoder", lambda _: decoder)
        mesh = {"tp": tp, "pp": pp}
        parallel = {"vocab_parallel_embedding": tp == 4, "max_position_embeddings": 64}
        autoshard.export.trtllm(model, path, mesh=mesh, dtype="float32", **parallel)
    config = json.loads((path / "config.json").read_text())
    shared = config["share_embedding_table"]
    assert config["use_parallel_embedding"] == (tp > 1 if shared else tp == 4)
    config["windows"] = [layer.attention.window or 99 for layer in decoder.layers]
    assert len([*path.iterdir()]) == tp * pp + 1
    return config, [load_file(path / f"rank{rank}.safetensors") for rank in range(tp * pp)]
