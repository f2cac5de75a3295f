"""Models of published rows: configurations of real families at a few layers, on the meta device.

A model is sums over layers of a few kinds, so that one layer of each kind, between others, tells of
the whole depth. Families are those of transformers; a decoder without a gate is `decoder.Decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from autoshard.model_source import checkpoint_layers
from autoshard.runtime import compat
from decoder import Decoder, Shape

#: What a row's file leaves to the configuration of the name, in transformers' own words.
BY_NAME: dict[str, dict[str, Any]] = {
    "moonshotai/Moonlight-16B-A3B": {
        **{"vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264},
        **{"moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64},
        **{"num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None},
        **{"n_group": 1, "topk_group": 1},
    },
    "moonshotai/Kimi-K2-Instruct": {
        **{"vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64},
        **{"n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
    "mistralai/Mixtral-8x22B-v0.1": {
        **{"vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384},
        **{"num_hidden_layers": 56, "num_attention_heads": 48, "num_key_value_heads": 8},
    },
}

#: Words of a name -> its configuration.
FAMILIES = {
    **dict.fromkeys(("deepseek-v3", "deepseek-r1", "moonlight", "kimi"), "DeepseekV3Config"),
    **{"gpt-oss": "GptOssConfig", "glm-4": "Glm4MoeConfig", "mixtral": "MixtralConfig"},
    **{"qwen3": "Qwen3MoeConfig", "llama": "LlamaConfig"},
}

_WORDS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "heads_kv": "num_key_value_heads",
    "head": "head_dim",
    "top_k": "num_experts_per_tok",
    "tied": "tie_word_embeddings",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class FewLayers:
    """A model of a few layers. at: the layer that stands for each kind. kinds: of every layer of
    the whole model."""

    config: Any
    at: Mapping[str, int]
    kinds: tuple[str, ...]
    layers: int


def few_layers(body: Mapping[str, Any], length: int, cut: bool = True) -> FewLayers:
    """The configuration of a row's model, cut to a few layers, or as it is. LookupError where no
    family is known."""
    if not body.get("gated", True):
        kinds = ("layer",) * body["layers"]
        return FewLayers(dict(body), {"layer": 1}, kinds, 3 if cut else body["layers"])
    name = body.get("hf", "")
    entries = {_WORDS[word]: value for word, value in body.items() if word in _WORDS}
    family = next((kind for word, kind in FAMILIES.items() if word in name.lower()), None)
    if not name:
        family = "Qwen3Config" if "head" in body else "LlamaConfig"
    if family is None:
        raise LookupError(f"no family of transformers is known for {name}")
    made = getattr(transformers, family)
    if "experts" in body:
        known = made().to_dict()
        entries |= {word: body["experts"] for word in _EXPERTS if word in known}
    wide = "moe_intermediate_size" if hasattr(made(), "moe_intermediate_size") else None
    if "hidden" in body:
        entries[wide or "intermediate_size"] = body["hidden"]
    if "dense_hidden" in body:
        entries |= {"intermediate_size": body["dense_hidden"]}
        entries |= {"first_k_dense_replace": body["dense_layers"]}
    entries |= BY_NAME.get(name, {})
    entries |= {"max_position_embeddings": max(length, 4096)}
    config = made(**entries)
    dense = getattr(config, "first_k_dense_replace", 0)
    windows = getattr(config, "layer_types", None)
    if windows and len(set(windows)) > 1:
        kinds = tuple(windows)
        at = {kinds[1]: 1, kinds[2]: 2}
    elif dense:
        kinds = ("dense",) * dense + ("layer",) * (config.num_hidden_layers - dense)
        at = {"dense": 0, "layer": 2}
        config.first_k_dense_replace = 1 if cut else dense
    else:
        kinds, at = ("layer",) * config.num_hidden_layers, {"layer": 1}
    layers = max(at.values()) + 2 if cut else len(kinds)
    config.num_hidden_layers = layers
    if windows:
        config.layer_types = list(windows[:layers])
    return FewLayers(config, at, kinds, layers)


def causal(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as one operator, whatever mask or sink a family has beside it."""
    made = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return made.transpose(1, 2).contiguous(), None


AttentionInterface.register("published_causal", causal)


class Adapted(nn.Module):
    """A frozen linear with a trained product of two narrow matrices beside it (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def adapt(model: nn.Module, rank: int, attention: bool) -> None:
    """Freeze a model, and put adapters beside the linears of its layers. attention: only of it."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        for child, linear in list(module.named_children()):
            inside = "layers." in name and ("attn" in name or not attention)
            if isinstance(linear, nn.Linear) and inside:
                setattr(module, child, Adapted(linear, rank))


def build(
    few: FewLayers,
    batch: int,
    length: int,
    checkpointing: str,
    lora: int = 0,
    attention: bool = False,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model of a few layers on the meta device, and its call."""
    with torch.device("meta"):
        if isinstance(few.config, dict):
            sizes = {word: few.config[word] for word in Shape.__annotations__ if word in few.config}
            shape = Shape(
                **{**sizes, "layers": few.layers}, length=length, checkpointing=checkpointing
            )
            ids = torch.zeros(batch, length, dtype=torch.long)
            return Decoder(shape).to(torch.bfloat16), (ids,), {}
        model = transformers.AutoModelForCausalLM.from_config(few.config)
    model.set_attn_implementation("published_causal")
    if lora:
        with torch.device("meta"):
            adapt(model, lora, attention)
    model = model.to(torch.bfloat16)
    compat.choose_causal_loss(model)
    compat.turn_off_cache(model)
    if lora and checkpointing == "full":  # the switch asks gradients of inputs, which breaks graphs
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    else:
        checkpoint_layers(model, checkpointing)
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return model, (), {"input_ids": ids, "labels": ids.clone()}
