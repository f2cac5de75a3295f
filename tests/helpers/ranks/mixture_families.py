"""Small mixtures of experts: families of transformers, and loops over experts by hand."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
HEADS = {**SHAPE, "head_dim": 8}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LLAMA4 = {
    "intermediate_size_mlp": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}

#: Class, its configuration, and how many of its layers are one node.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**HEADS, "num_local_experts": 4}, 2),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**HEADS, **FOUR, "moe_intermediate_size": 16, "norm_topk_prob": True},
        2,
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**SHAPE, **FOUR}, 2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**SHAPE, **LATENT}, 1),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**HEADS, "num_local_experts": 4}, 2),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {**HEADS, **LLAMA4}, 0),
}


class WithLabels(nn.Module):
    """The loss of a language model that predicts its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return found


def family(name: str, dtype: torch.dtype) -> nn.Module:
    model, config, settings, _ = FAMILIES[name]
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in made.parameters():  # biases begin as zeros, which hide what they do
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return WithLabels(made.to(dtype))


class Loop(nn.Module):
    """Experts as modules, each run on all tokens; what a token did not choose counts zero. The loss
    is a mean square."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden, 64, bias=False), nn.SiLU(), nn.Linear(64, hidden, bias=False)
            )
            for _ in range(4)
        )

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The experts' sum for each token."""
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == i)).sum(-1, keepdim=True)
        return out

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        return (x + self.routed(x, weights, ids)).square().mean()


class PickingLoop(Loop):
    """Each expert runs on the tokens that chose it, which are picked by their values."""

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The experts' sum for each token."""
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out


class Bounded(Loop):
    """Each expert has room for as many tokens as all of them divided evenly (capacity factor 1):
    later ones are dropped, as in GShard and the Switch Transformer."""

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The experts' sum for each token."""
        experts, room = len(self.experts), x.shape[0] * ids.shape[1] // len(self.experts)
        chosen = nn.functional.one_hot(ids.reshape(-1), experts)
        place = (chosen.cumsum(0) * chosen - 1).reshape(*ids.shape, experts)
        kept = (place >= 0) & (place < room)
        slot = nn.functional.one_hot(place.clamp(0, room - 1), room) * kept.unsqueeze(-1)
        combine = torch.einsum("tk,tkec->tec", weights, slot.to(x.dtype))
        rows = torch.einsum("tec,th->ech", (combine > 0).to(x.dtype), x)
        out = torch.stack([expert(rows[i]) for i, expert in enumerate(self.experts)])
        return torch.einsum("tec,ech->th", combine, out)
