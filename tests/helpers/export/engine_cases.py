"""Tiny decoders for the engine tests, their networks, and what the unsharded model says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.rank_graph.plan import InferencePlan, plan_inference
from autoshard.export.rank_graph.weights import read_weights
from autoshard.export.serial_graph import WeightSource
from autoshard.export.spec import EngineSpec
from autoshard.verification.comparison import furthest
from side_by_side import difference_by_norm

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = ("llama", "qwen3", "mixtral", "gpt2")
DYNAMIC = {"batch": (1, 2, 4), "sequence": (1, 8, 16)}
LENGTH = 64
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3], list(range(20, 40))]
"""Of different lengths; the last is longer than an engine of DYNAMIC takes at once."""


def make(name: str, **options: Any) -> nn.Module:
    """A model in eval mode with weights large enough that every operator matters."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=256,
            n_positions=128,
            n_embd=64,
            n_layer=2,
            n_head=8,
            bos_token_id=1,
            eos_token_id=2,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        kinds = {"llama": "Llama", "qwen3": "Qwen3", "mixtral": "Mixtral", "mistral": "Mistral"}
        more: dict[str, dict[str, Any]] = {
            "qwen3": {"head_dim": 16},
            "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        }
        settings = {**SIZES, **more.get(name, {}), **options}
        config = getattr(transformers, f"{kinds[name]}Config")(**settings)
        model = getattr(transformers, f"{kinds[name]}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@functools.cache
def model(name: str) -> nn.Module:
    """`make(name)`, once."""
    return make(name)


@functools.cache
def plan(
    name: str, tp: int, dtype: torch.dtype = torch.float32, length: int | None = None
) -> InferencePlan:
    """A plan of `model(name)`, once."""
    spec = EngineSpec(mesh={"tp": tp}, dtype=dtype, dynamic=DYNAMIC, max_length=length)
    return plan_inference(model(name), spec)


@functools.cache
def rank(
    name: str, tp: int, rank: int, dtype: torch.dtype = torch.float32, length: int | None = None
) -> tuple[RankGraph, dict[str, torch.Tensor]]:
    """A rank's graph and weights, once; neither may be changed."""
    graph = plan(name, tp, dtype, length).rank_graph(rank)
    return graph, read_weights(WeightSource(model(name)), graph, rank)


def feeds(length: int | None) -> list[dict[str, torch.Tensor]]:
    """Two batches of two sizes; with a cache: a prompt, then token by token."""
    generator = torch.Generator().manual_seed(1)
    if length is None:
        shapes = ((2, 8), (3, 11))
        return [{"input_ids": torch.randint(256, s, generator=generator)} for s in shapes]
    ids = torch.randint(256, (3, 12), generator=generator)
    parts = [(0, 7), (7, 9), *((i, i + 1) for i in range(9, 12))]
    return [
        {
            "input_ids": ids[:, a:b],
            "past_lengths": torch.full((3,), a, dtype=torch.int32),
            "last_tokens": torch.full((3,), b - a - 1, dtype=torch.int32),
        }
        for a, b in parts
    ]


def expected(name: str, length: int | None) -> list[torch.Tensor]:
    """The unsharded fp32 model's logits for `feeds`; with a cache, of the last tokens."""
    with torch.no_grad():
        ids = [feed["input_ids"] for feed in feeds(length)]
        if length is None:
            return [model(name)(one).logits for one in ids]
        whole = model(name)(torch.cat(ids, 1)).logits
        return [part[:, -1:] for part in whole.split([one.shape[1] for one in ids], 1)]


def error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative difference, by norm, of any pair."""
    pairs = zip(found, wanted, strict=True)
    return furthest(difference_by_norm(f.float(), w) for f, w in pairs)


def difference(
    outputs: Sequence[Sequence[dict[str, torch.Tensor]]], name: str, length: int | None
) -> float:
    """The largest `error` of any rank's outputs for `feeds`."""
    wanted = expected(name, length)
    return furthest(error([out["logits"] for out in rank], wanted) for rank in outputs)


def greedy(name: str, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """What the unsharded model says next, without any cache."""
    answers = []
    for prompt in prompts:
        row = list(prompt)
        for _ in range(steps):
            with torch.no_grad():
                row.append(int(model(name)(torch.tensor([row])).logits[0, -1].argmax()))
        answers.append(row[len(prompt) :])
    return answers
