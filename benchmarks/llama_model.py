"""A Llama of about 30 million parameters in plain PyTorch, for benchmarks; and its hand-made plans.

The plans are what a user of `parallelize_module` writes for this model: Megatron's column and row
linears, a vocab-parallel embedding and loss, with and without sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the default has 29.6 million parameters."""

    vocab: int = 8192
    width: int = 512
    hidden: int = 1408
    layers: int = 6
    heads: int = 8
    length: int = 128


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def heads(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [batch, heads, length, head_dim]."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = (
            t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k)
        )
        return q, k, v

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """The gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and a feed-forward net, each added to the residual stream."""

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


def add_rotary_tables(model: nn.Module, head_dim: int, length: int) -> None:
    """Buffers `cos` and `sin` [length, head_dim] of rotary positions."""
    half = head_dim // 2
    angle = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(half) / half))
    model.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
    model.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)


class Llama(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(
            [Block(shape.width, Attention(shape), MLP(shape)) for _ in range(shape.layers)]
        )
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        add_rotary_tables(self, shape.width // shape.heads, shape.length)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class WithLoss(nn.Module):
    """The model and the mean loss of predicting each token from those before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model(ids), ids)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits [batch, length, vocab]; the last position has no target."""
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallelize_by_hand(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard in place over the mesh's only dim; logits come out as DTensors split by vocabulary."""
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    for i in range(len(model.blocks)):
        at = f"blocks.{i}"
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            plan[f"{at}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "mlp.down"):
            plan[f"{at}.{name}"] = RowwiseParallel(output_layouts=stream)
        if sequence_parallel:
            plan[f"{at}.attention_norm"] = plan[f"{at}.mlp_norm"] = SequenceParallel()
            plan[f"{at}.attention"] = PrepareModuleInput(
                input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
            )
            plan[f"{at}.mlp"] = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),)
            )
    parallelize_module(model, mesh, plan)
