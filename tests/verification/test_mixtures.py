"""Families of mixtures of experts on two ranks, beside the serial model: loss, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autoshard.planning.mixtures import is_mixture
from autoshard.program import Program
from autoshard.runtime.operators.bound import unbound
from autoshard.runtime.operators.experts import exchanged_experts
from autoshard.verification.program_check import verify_program
from gradient_types import check_types
from traced import programs

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


def _checked(name: str, dtype: torch.dtype, tolerance: float, axis: str = "tp") -> Program:
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(1)
    ids, other = (torch.randint(0, 64, (2, 8), generator=generator) for _ in range(2))
    (program,), values = programs(family(name, dtype), (ids,), [{"mesh": {axis: 2}}])
    nodes = [node for node in program.serial.graph.nodes if is_mixture(node)]
    assert len(nodes) == FAMILIES[name][3]
    stored = program.stored()
    if axis == "ep":
        stored = {name: program.data[node][axis] for node, name in program.parameters.items()}
    experts = {k: s for k, s in stored.items() if ".experts." in k and "bias" not in k}
    assert experts and all(state.startswith("S") for state in experts.values())
    others = [[other if v is ids else v for v in values]] if axis == "ep" else []
    differences = verify_program(program, values, others=others)
    assert max(*differences.outputs.values(), *differences.norms.values()) < tolerance
    return program


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_its_serial_model(name: str) -> None:
    program = _checked(name, torch.float32, 1e-5)
    if name != "deepseek_v3":  # a head that all heads share is no shard to the checker
        check_types(program)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_ep_equals_its_serial_model(name: str) -> None:
    """Each rank has a batch of its own; rows travel to the ranks of their experts."""
    program = _checked(name, torch.float32, 1e-5, "ep")
    nodes = program.graph_module.graph.nodes
    exchanged = [n for n in nodes if unbound(n.target)[0] is exchanged_experts]
    assert len(exchanged) == FAMILIES[name][3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_bfloat16_equals_its_serial_model(name: str, axis: str) -> None:
    """As far as sums of two halves of 8 bits of mantissa can be those of the whole."""
    _checked(name, torch.bfloat16, 5e-2, axis)
