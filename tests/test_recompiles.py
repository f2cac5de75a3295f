"""New shapes, modes and graphs of a model that is sharded already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from models_plain import MLP
from side_by_side import Pair, check, difference

WIDTH, VOCAB = 64, 512


class Block(nn.Module):
    """An embedding, an attention block and an MLP, each after a norm, and a head; the loss."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = MLP(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        qkv = self.qkv(self.norms[0](h)).unflatten(-1, (3, 4, WIDTH // 4))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).flatten(2))
        h = h + self.mlp(self.norms[1](h))
        if not self.training:
            h = h * 0.5  # eval is another graph
        logits = self.head(self.norms[2](h))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def ids(step: int, rows: int = 4, length: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (rows, length), generator=generator)


def shapes(sizes: list[tuple[int, int]], options: dict[str, Any]) -> dict[str, Any]:
    """Train on batches of these sizes; programs after each, and sharded symbolic sizes."""
    import autoshard

    pair = Pair(Block(), **options)
    counts = []
    for step, (rows, length) in enumerate(sizes):
        batch = ids(step, rows, length)
        pair.train([lambda m, b=batch: m(b)])
        counts.append(pair.programs())
    sequence = [
        sum(
            str(state) == "S(1)"
            for node in p.serial.graph.nodes
            if node.op == "call_function" and node in p.decisions.strategies
            for state in [p.decisions.strategies[node].output]
        )
        for p in autoshard.programs(pair.model)
    ]
    return {**pair.result(), "counts": counts, "sequence": sequence}


def test_batch_sizes(gloo2: Any) -> None:
    results = gloo2(shapes, [(2, 32), (2, 32), (3, 32), (4, 32), (7, 32)], {})
    check(results, share=0.9)
    counts = results[0]["counts"]
    assert counts[0] == counts[1] == 1 and counts[-1] <= 3, counts
    assert results[0]["counts"] == results[1]["counts"]
