"""A decoder of the shape that most published training runs have, with its activation checkpointing.

Plain PyTorch: rotary positions, grouped queries, a gated or a plain feed-forward net, the loss in
float32 as trainers compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llama_model import Block, add_rotary_tables


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, and how its layers are checkpointed.

    heads_kv: heads of keys and values. gated: two matrices before the activation function.
    checkpointing: "none"; "full": a layer keeps its input; "selective": and the results of
    attention and of every second product.
    """

    vocab: int
    width: int
    hidden: int
    layers: int
    heads: int
    heads_kv: int
    length: int
    gated: bool = True
    checkpointing: str = "none"


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        narrow = self.head_dim * shape.heads_kv
        self.q, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.width, narrow, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = (
            t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two matrices, or three with a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """Token ids [batch, length] to the mean loss of predicting each from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(
            [Block(shape.width, Attention(shape), FeedForward(shape)) for _ in range(shape.layers)]
        )
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        add_rotary_tables(self, shape.width // shape.heads, shape.length)
        self.run = _CHECKPOINTING[shape.checkpointing]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = self.run(layer, x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _every_second(counted: dict[bool, int], ctx: Any, operator: Any, *_: Any, **__: Any) -> Any:
    if operator is torch.ops.aten.mm.default:
        counted[ctx.is_recompute] = counted.get(ctx.is_recompute, 0) + 1
        kept = counted[ctx.is_recompute] % 2 == 1
    else:
        kept = "scaled_dot_product" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(partial(_every_second, {}))


_CHECKPOINTING: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda layer, *args: layer(*args),
    "full": lambda layer, *args: checkpoint(layer, *args, use_reentrant=False),
    "selective": lambda layer, *args: checkpoint(
        layer, *args, use_reentrant=False, context_fn=_selective
    ),
}
