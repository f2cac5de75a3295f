"""TensorRT-LLM checkpoints by Hugging Face names: the converters' rules, written out anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def expected(
    model: Any, name: str, tp: int, pp: int, rank: int, dtype: torch.dtype, parallel: bool = False
) -> dict[str, Tensor]:
    """The tensors of `rank{rank}.safetensors`."""
    sd = {key: value.detach() for key, value in model.state_dict().items()}
    stage, r = divmod(rank, tp)
    count = model.config.num_hidden_layers // pp
    family = name.partition("_")[0]
    layer = {"gpt2": _gpt2, "falcon": _falcon}.get(family, _llama)
    prefix = "transformer.h" if family in ("gpt2", "falcon") else "model.layers"
    out: dict[str, Tensor] = {}
    for i in range(count):
        start = f"{prefix}.{stage * count + i}."
        own = {k.removeprefix(start): v for k, v in sd.items() if k.startswith(start)}
        for key, value in layer(own, model.config, family, tp, r).items():
            out[f"transformer.layers.{i}.{key}"] = value
    embed = next(
        sd[k] for k in sd if k.split(".")[-2] in ("embed_tokens", "wte", "word_embeddings")
    )
    parallel = parallel or (family == "gemma" and tp > 1)
    if stage == 0:
        out["transformer.vocab_embedding.weight"] = _padded(embed, tp, r) if parallel else embed
        if family == "gpt2":
            out["transformer.position_embedding.weight"] = sd["transformer.wpe.weight"]
    if stage == pp - 1:
        for part in ("weight", "bias"):
            key = "model.norm." if prefix == "model.layers" else "transformer.ln_f."
            if key + part in sd:
                out[f"transformer.ln_f.{part}"] = sd[key + part] + (family == "gemma")
        if family != "gemma":
            out["lm_head.weight"] = _padded(sd.get("lm_head.weight", embed), tp, r)
    return {k: v if "router" in k else v.to(dtype) for k, v in out.items()}


def _padded(table: Tensor, tp: int, r: int) -> Tensor:
    size = -(-len(table) // tp)
    full = torch.cat([table, table.new_zeros(size * tp - len(table), table.shape[1])])
    return full[r * size : (r + 1) * size]


def _heads(q: Tensor, k: Tensor, v: Tensor, config: Any, tp: int, r: int, dim: int) -> Tensor:
    """This rank's q, k and v, with k and v heads repeated where there are fewer than ranks."""
    parts = [q.chunk(tp)[r]]
    for x in (k, v):
        heads = x.reshape(-1, dim, *x.shape[1:])
        if len(heads) < tp:
            heads = torch.stack([heads] * (tp // len(heads)), 1).flatten(0, 1)
        parts.append(heads.chunk(tp)[r].flatten(0, 1))
    return torch.cat(parts)


def _llama(sd: dict[str, Tensor], config: Any, family: str, tp: int, r: int) -> dict[str, Tensor]:
    one = float(family == "gemma")
    out = {
        "input_layernorm.weight": sd["input_layernorm.weight"] + one,
        "post_layernorm.weight": sd["post_attention_layernorm.weight"] + one,
    }
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for part in ("weight", "bias"):
        if f"self_attn.q_proj.{part}" in sd:
            q, k, v = (sd[f"self_attn.{n}_proj.{part}"] for n in "qkv")
            out[f"attention.qkv.{part}"] = _heads(q, k, v, config, tp, r, dim)
        if f"mlp.up_proj.{part}" in sd:
            out[f"mlp.gate.{part}"] = sd[f"mlp.up_proj.{part}"].chunk(tp)[r]
            out[f"mlp.fc.{part}"] = sd[f"mlp.gate_proj.{part}"].chunk(tp)[r]
    for ours, theirs in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
        if f"{theirs}.weight" in sd:
            out[f"{ours}.weight"] = sd[f"{theirs}.weight"].chunk(tp, 1)[r]
        if f"{theirs}.bias" in sd:
            out[f"{ours}.bias"] = sd[f"{theirs}.bias"]
    if family == "mixtral":
        w1, w3 = sd["mlp.experts.gate_up_proj"].chunk(2, 1)
        out["mlp.fc.weight"] = torch.cat([w3.chunk(tp, 1)[r], w1.chunk(tp, 1)[r]], 1)
        out["mlp.proj.weight"] = sd["mlp.experts.down_proj"].chunk(tp, 2)[r]
        out["mlp.router.weight"] = sd["mlp.gate.weight"].float()
    return out


def _gpt2(sd: dict[str, Tensor], config: Any, family: str, tp: int, r: int) -> dict[str, Tensor]:
    q, k, v = sd["attn.c_attn.weight"].t().chunk(3)
    bq, bk, bv = sd["attn.c_attn.bias"].chunk(3)
    dim = config.n_embd // config.n_head
    return {
        "input_layernorm.weight": sd["ln_1.weight"],
        "input_layernorm.bias": sd["ln_1.bias"],
        "post_layernorm.weight": sd["ln_2.weight"],
        "post_layernorm.bias": sd["ln_2.bias"],
        "attention.qkv.weight": _heads(q, k, v, config, tp, r, dim),
        "attention.qkv.bias": _heads(bq, bk, bv, config, tp, r, dim),
        "attention.dense.weight": sd["attn.c_proj.weight"].t().chunk(tp, 1)[r],
        "attention.dense.bias": sd["attn.c_proj.bias"],
        "mlp.fc.weight": sd["mlp.c_fc.weight"].t().chunk(tp)[r],
        "mlp.fc.bias": sd["mlp.c_fc.bias"].chunk(tp)[r],
        "mlp.proj.weight": sd["mlp.c_proj.weight"].t().chunk(tp, 1)[r],
        "mlp.proj.bias": sd["mlp.c_proj.bias"],
    }


def _falcon(sd: dict[str, Tensor], config: Any, family: str, tp: int, r: int) -> dict[str, Tensor]:
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    kv = heads
    if config.new_decoder_architecture:
        kv = config.num_kv_heads
    elif config.multi_query:
        kv = 1
    out = {}
    names = {
        "input_layernorm": "ln_attn" if "ln_attn.weight" in sd else "input_layernorm",
        "mlp_layernorm": "ln_mlp",
        "post_layernorm": "post_attention_layernorm",
    }
    for part in ("weight", "bias"):
        for ours, theirs in names.items():
            if f"{theirs}.{part}" in sd:
                out[f"{ours}.{part}"] = sd[f"{theirs}.{part}"]
        if f"self_attention.query_key_value.{part}" in sd:
            fused = sd[f"self_attention.query_key_value.{part}"]
            groups = fused.reshape(kv, heads // kv + 2, dim, *fused.shape[1:])
            q, k, v = (x.flatten(0, 2) for x in groups.split([heads // kv, 1, 1], 1))
            out[f"attention.qkv.{part}"] = _heads(q, k, v, config, tp, r, dim)
            out[f"mlp.fc.{part}"] = sd[f"mlp.dense_h_to_4h.{part}"].chunk(tp)[r]
    for ours, theirs in (
        ("attention.dense", "self_attention.dense"),
        ("mlp.proj", "mlp.dense_4h_to_h"),
    ):
        out[f"{ours}.weight"] = sd[f"{theirs}.weight"].chunk(tp, 1)[r]
        if f"{theirs}.bias" in sd:
            out[f"{ours}.bias"] = sd[f"{theirs}.bias"]
    return out
