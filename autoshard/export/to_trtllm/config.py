"""The config.json of a TensorRT-LLM checkpoint, from the structure that was read off the graph.

The fields, their names and defaults are those of TensorRT-LLM 0.16 to 1.2; those that one family
alone has come last.
"""

from typing import Any

from autoshard.export.decoder import Attention, ConfigFacts, Decoder, Mlp, config_facts
from autoshard.export.errors import export_error
from autoshard.export.to_trtllm.families import (
    BLOOM,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    GPTJ,
    LLAMA,
    MIXTRAL,
    OPT,
    PHI3,
    STARCODER2,
    Family,
)
from autoshard.export.to_trtllm.tensors import Split


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
    width = told.dense_width if mlp.experts and told.dense_width else mlp.width
    return {
        "architecture": told.architecture,
        "dtype": str(split.dtype).removeprefix("torch."),
        "vocab_size": decoder.vocab,
        "hidden_size": decoder.hidden,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": attention.heads,
        "hidden_act": (family.own_activation and told.activation)
        or family.activations[mlp.activation],
        "logits_dtype": "float32",
        "norm_epsilon": decoder.norm.eps,
        "runtime_defaults": None,
        "position_embedding_type": _positions(attention),
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": width,
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
        "rotary_embedding_dim": _turned(attention),
        **family_fields(decoder, family, told, longest),
    }


def _positions(attention: Attention) -> str:
    """TensorRT-LLM's name of how positions enter."""
    if attention.rotary is not None:
        return "rope_gptj" if attention.rotary.interleaved else "rope_gpt_neox"
    return "learned_absolute" if attention.slopes is None else "alibi"


_SERVE = "Serve a Hugging Face directory instead (autoshard export huggingface)."


def family_fields(
    decoder: Decoder, family: Family, told: ConfigFacts, longest: int
) -> dict[str, Any]:
    """The fields. Raises ExportError where a family has none for what the decoder has."""
    first = decoder.layers[0]
    attention, mlp, base = first.attention, first.mlp, told.rotary.base
    biases = {"mlp_bias": mlp.down.bias is not None, "attn_bias": attention.query.bias is not None}
    rotary = _rotary(family, told)
    # the part of a head that turns; int(part * head_dim) is what TensorRT-LLM turns
    part = _turned(attention) / attention.head_dim
    part += 0 if int(part * attention.head_dim) == _turned(attention) else 1e-9
    if family in (LLAMA, MIXTRAL):
        return {
            **biases,
            **rotary,
            "residual_mlp": False,
            "disable_weight_only_quant_plugin": False,
            "moe": _moe(int(mlp.renormalised) if mlp.experts else None, mlp),
            "remove_duplicated_kv_heads": False,
            "fc_after_embed": False,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "layer_idx_offset": 0,
        }
    if family in (GEMMA, GEMMA2, GEMMA3):
        return {**biases, **rotary, **_gemma(decoder, family, told)}
    if family is PHI3:
        scaling = told.rotary.scaling
        original = "original_max_position_embeddings"
        return {
            **rotary,
            "rotary_pct": part,
            "tie_word_embeddings": decoder.tied,
            **(
                {}
                if scaling is None
                else {
                    "position_embedding_type": "long_rope",
                    original: scaling[original],
                    "longrope_scaling_short_factors": list(scaling["short_factor"]),
                    "longrope_scaling_long_factors": list(scaling["long_factor"]),
                }
            ),
        }
    if family in (GPT2, STARCODER2):
        return {
            "gpt_variant": family.name,
            "bias": attention.dense.bias is not None,
            "q_scaling": 1,
            "embedding_scale": None,
            "apply_query_key_layer_scaling": False,
            "rotary_pct": 1.0,
            **rotary,
            "inner_layernorm": False,
            "norm_before_bmm1": False,
            "moe": _moe(1, mlp),
        }
    if family is FALCON:
        two_norms = first.parallel and first.mlp_norm is not first.attention_norm
        grouped = attention.kv_heads not in (1, attention.heads)
        return {
            "bias": attention.dense.bias is not None,
            "parallel_attention": first.parallel,
            "num_ln_in_parallel_attn": told.norms_in_parallel,
            "new_decoder_architecture": two_norms or grouped,
            "rotary_base": base,
        }
    if family is GPT_NEOX:
        # its attention reads rotary_emb_base, the table of angles is made from rotary_base
        return {"rotary_pct": part, "rotary_emb_base": base, "rotary_base": base}
    if family is GPTJ:
        return {"rotary_dim": _turned(attention), "rotary_base": base}
    if family is OPT:
        return {"do_layer_norm_before": True}
    if family is BLOOM:
        return {}
    return {
        **biases,
        **rotary,
        "disable_weight_only_quant_plugin": False,
        "num_labels": 1,
        "use_logn_attn": False,
        "seq_length": 8192,
        "moe": _moe(int(mlp.renormalised and mlp.experts > 0), mlp),
        "qwen_type": family.name,
        "moe_intermediate_size": mlp.width if mlp.experts else 0,
        "moe_shared_expert_intermediate_size": 0 if mlp.shared is None else mlp.shared.width,
        "tie_word_embeddings": decoder.tied,
    }


def _turned(attention: Attention) -> int:
    """The dims of a head that a rotary embedding turns, all where there is none."""
    return attention.head_dim if attention.rotary is None else attention.rotary.dim


def _rotary(family: Family, told: ConfigFacts) -> dict[str, Any]:
    """Base and scaling; a scaling that the family's table of angles does not have is an error."""
    scaling = told.rotary.scaling
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    simple = (LLAMA, MIXTRAL, GEMMA, GEMMA2, STARCODER2, GPT2)
    known = family in simple or family.name.startswith("qwen")
    if kind == "longrope" and family is PHI3:
        scaling = None  # it has fields of its own
    elif kind is not None and not (known and kind in ("linear", "llama3", "yarn")):
        raise export_error(
            f"TensorRT-LLM's {family.name} has no rotary scaling of type {kind}", remedy=_SERVE
        )
    return {"rotary_base": told.rotary.base, "rotary_scaling": scaling}


def _gemma(decoder: Decoder, family: Family, told: ConfigFacts) -> dict[str, Any]:
    if family is GEMMA:
        return {"inter_layernorms": False}
    attention = decoder.layers[0].attention
    scalar = attention.scale**-2
    fields: dict[str, Any] = {
        "inter_layernorms": True,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-3 else scalar,
        "final_logit_softcapping": decoder.softcap,
    }
    if family is GEMMA2:
        return {**fields, "attn_logit_softcapping": attention.softcap}
    rotary = told.rotary
    windows = [layer.attention.window for layer in decoder.layers if layer.attention.window]
    return {
        **fields,
        "_sliding_window_pattern": _pattern(rotary.local),
        "rope_local_base_freq": rotary.local_base if rotary.local_base else rotary.base,
        "sliding_window": told.window or next(iter(windows), None),
    }


def _pattern(local: tuple[bool, ...]) -> int:
    """n, where every n-th layer sees all tokens and turns by the base of the whole."""
    if not any(local):
        return 1
    first = local.index(False) + 1 if False in local else len(local) + 1
    if any(one != bool((i + 1) % first) for i, one in enumerate(local)):
        whole = [i for i, one in enumerate(local) if not one]
        raise export_error(
            f"layers {whole} see all tokens; in TensorRT-LLM's gemma3 it is every n-th",
            remedy=_SERVE,
        )
    return first


def _moe(normalization: int | None, mlp: Mlp) -> dict[str, Any]:
    """normalization: 0, the weights of a softmax over all experts; 1, divided by their sum."""
    return {
        "num_experts": mlp.experts,
        "shared_expert_intermediate_size": 0 if mlp.shared is None else mlp.shared.width,
        "top_k": mlp.top_k,
        "normalization_mode": normalization,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }
