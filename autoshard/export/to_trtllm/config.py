"""The config.json of a TensorRT-LLM checkpoint, from the structure that was read off the graph.

The fields, their names and defaults are those of TensorRT-LLM 0.16 to 1.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autoshard.export.decoder import ConfigFacts, Decoder, Layer, config_facts
from autoshard.export.errors import export_error
from autoshard.export.to_trtllm.tensors import Split


@dataclass(frozen=True)
class Family:
    """A model family of TensorRT-LLM. architecture: its name where no configuration gives one.
    activations: the names it gives to functions. architectures: the names it covers."""

    name: str
    architectures: tuple[str, ...]
    activations: dict[str, str]

    @property
    def architecture(self) -> str:
        return self.architectures[0]


LLAMA = Family("llama", ("LlamaForCausalLM", "MistralForCausalLM"), {"silu": "silu"})
MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), {"silu": "swiglu"})
QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), {"silu": "silu"})
GEMMA = Family("gemma", ("GemmaForCausalLM",), {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"})
GPT2 = Family(
    "gpt2", ("GPT2LMHeadModel",), {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
)
FALCON = Family("falcon", ("FalconForCausalLM",), {"gelu": "gelu"})


def family_of(decoder: Decoder) -> Family:
    """The family whose layers these are. Raises ExportError where there is none."""
    first = decoder.layers[0]
    for layer in decoder.layers[1:]:
        if _kind(layer) != _kind(first):
            raise export_error(
                f"this layer is {_kind(layer)}, the first is {_kind(first)}", layer.attention.node
            )
    attention, mlp = first.attention, first.mlp
    qkv_bias, dense_bias = attention.query.bias is not None, attention.dense.bias is not None
    gated = mlp.gate is not None
    found = None
    if decoder.norm.kind == "rms" and gated and attention.rotary is not None and not first.parallel:
        if decoder.norm.zero_centred:
            found = GEMMA
        elif mlp.experts:
            found = MIXTRAL
        else:
            found = QWEN2 if qkv_bias and not dense_bias else LLAMA
    elif decoder.norm.kind == "layer" and not gated and not mlp.experts:
        if attention.rotary is not None:
            found = FALCON
        elif decoder.positions is not None and not first.parallel:
            found = GPT2
    if found is None:
        raise export_error(
            f"layers of this kind have no family in TensorRT-LLM's checkpoints: {_kind(first)}",
            attention.node,
        )
    expected = math.sqrt(decoder.hidden) if found is GEMMA else 1.0
    if not math.isclose(decoder.embedding_scale, expected, rel_tol=1e-2):
        raise export_error(
            f"token embeddings are scaled by {decoder.embedding_scale:g}, in {found.name} by "
            f"{expected:g}"
        )
    return found


def checkpoint_config(
    decoder: Decoder, family: Family, split: Split, hf_config: Any, max_positions: int | None
) -> dict[str, Any]:
    """The content of config.json. hf_config: the model's own configuration, or None; it must
    agree with the structure. max_positions: where neither knows the longest sequence."""
    attention, mlp = decoder.layers[0].attention, decoder.layers[0].mlp
    told = config_facts(decoder, family.architectures, hf_config)
    longest = decoder.max_positions or told.max_positions or max_positions
    if longest is None:
        raise export_error(
            "neither the graph nor a configuration says how long a sequence may be",
            remedy="Give max_position_embeddings=.",
        )
    return {
        **_family_fields(decoder, family, told),
        "architecture": told.architecture,
        "dtype": str(split.dtype).removeprefix("torch."),
        "vocab_size": decoder.vocab,
        "hidden_size": decoder.hidden,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": attention.heads,
        "hidden_act": _activation(mlp.activation, family, told),
        "logits_dtype": "float32",
        "norm_epsilon": decoder.norm.eps,
        "runtime_defaults": None,
        "position_embedding_type": (
            "learned_absolute" if attention.rotary is None else "rope_gpt_neox"
        ),
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": mlp.width,
        "max_position_embeddings": longest,
        "mapping": {
            "world_size": split.tp * split.pp,
            "gpus_per_node": 8,
            "cp_size": 1,
            "tp_size": split.tp,
            "pp_size": split.pp,
            "moe_tp_size": split.tp,
            "moe_ep_size": 1,
        },
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": None,
            "group_size": 128,
            "smoothquant_val": 0.5,
            "clamp_val": None,
            "use_meta_recipe": False,
            "has_zero_point": False,
            "pre_quant_scale": False,
            "exclude_modules": None,
        },
        "use_parallel_embedding": split.parallel_embedding,
        "embedding_sharding_dim": 0,
        "share_embedding_table": split.share_embedding,
        "head_size": attention.head_dim,
        "qk_layernorm": False,
        "rotary_embedding_dim": attention.head_dim,
    }


def _family_fields(decoder: Decoder, family: Family, told: ConfigFacts) -> dict[str, Any]:
    first = decoder.layers[0]
    rotary = {"rotary_base": told.rotary_base, "rotary_scaling": told.rotary_scaling}
    biases = {
        "mlp_bias": first.mlp.down.bias is not None,
        "attn_bias": first.attention.query.bias is not None,
    }
    if family in (LLAMA, MIXTRAL):
        mode = 1 if first.mlp.experts else None
        return {
            **biases,
            **rotary,
            "residual_mlp": False,
            "disable_weight_only_quant_plugin": False,
            "moe": _moe(mode, first.mlp.experts, first.mlp.top_k),
            "remove_duplicated_kv_heads": False,
            "fc_after_embed": False,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "layer_idx_offset": 0,
        }
    if family is QWEN2:
        return {
            **biases,
            **rotary,
            "disable_weight_only_quant_plugin": False,
            "num_labels": 1,
            "moe": _moe(0),
            "qwen_type": "qwen2",
            "moe_intermediate_size": 0,
            "moe_shared_expert_intermediate_size": 0,
            "tie_word_embeddings": decoder.tied,
        }
    if family is GEMMA:
        return {**biases, **rotary, "inter_layernorms": False}
    if family is FALCON:
        two_norms = first.parallel and first.mlp_norm is not first.attention_norm
        grouped = first.attention.kv_heads not in (1, first.attention.heads)
        return {
            "bias": first.attention.dense.bias is not None,
            "parallel_attention": first.parallel,
            "num_ln_in_parallel_attn": told.norms_in_parallel,
            "new_decoder_architecture": two_norms or grouped,
            "rotary_base": told.rotary_base,
        }
    return {
        "gpt_variant": "gpt2",
        "bias": first.attention.dense.bias is not None,
        "q_scaling": 1,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "rotary_pct": 1.0,
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
        "moe": _moe(1),
    }


def _moe(normalization: int | None, experts: int = 0, top_k: int = 0) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "shared_expert_intermediate_size": 0,
        "top_k": top_k,
        "normalization_mode": normalization,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }


def _activation(name: str, family: Family, told: ConfigFacts) -> str:
    """The family's name of the activation; a configuration's own where it means the same."""
    if name not in family.activations:
        raise export_error(
            f"activation {name} has no name in {family.name}, which knows "
            f"{', '.join(family.activations)}"
        )
    own = told.activation
    return (
        own
        if own is not None and family in (GPT2, GEMMA, LLAMA, QWEN2)
        else family.activations[name]
    )


def _kind(layer: Layer) -> str:
    attention, mlp = layer.attention, layer.mlp
    one = layer.attention_norm
    return (
        f"{attention.heads} heads over {attention.kv_heads} of {attention.head_dim}, "
        f"rotary {attention.rotary is not None}, biases {attention.query.bias is not None}/"
        f"{attention.dense.bias is not None}/{mlp.down.bias is not None}, "
        f"{one.kind} norms of eps {one.eps:g} and {layer.mlp_norm.eps:g}, "
        f"MLP of {mlp.width} with {mlp.activation}, gated {mlp.gate is not None}, "
        f"experts {mlp.experts} of which {mlp.top_k}, parallel {layer.parallel}"
    )
