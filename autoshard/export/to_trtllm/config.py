"""The config.json of a TensorRT-LLM checkpoint, from the structure that was read off the graph.

The fields, their names and defaults are those of TensorRT-LLM 0.16 to 1.2; those of one family
alone are in family_fields.py.
"""

from __future__ import annotations

from typing import Any

from autoshard.export.decoder import ConfigFacts, Decoder, config_facts
from autoshard.export.errors import export_error
from autoshard.export.to_trtllm.families import Family
from autoshard.export.to_trtllm.family_fields import family_fields
from autoshard.export.to_trtllm.features import position_type
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
        "hidden_act": _activation(mlp.activation, family, told),
        "logits_dtype": "float32",
        "norm_epsilon": decoder.norm.eps,
        "runtime_defaults": None,
        "position_embedding_type": position_type(decoder),
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
        "rotary_embedding_dim": attention.head_dim
        if attention.rotary is None
        else attention.rotary.dim,
        **family_fields(decoder, family, told, longest),
    }


def _activation(name: str, family: Family, told: ConfigFacts) -> str:
    """The family's name of the activation; a configuration's own where the family takes it."""
    own = told.activation if family.own_activation else None
    return family.activations[name] if own is None else own
