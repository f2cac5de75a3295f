"""A model of your own, in a plain training loop.

    torchrun --nproc-per-node 2 examples/custom_model.py

The loop is that of one process; the batch is the same on every rank of the tp axis. Started with
`python`, it prints the same losses: with "rng" named, dropout draws the same numbers on any mesh.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

import autoshard


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1, self.training)


class Model(nn.Module):
    """Predicts the next of 256 tokens."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    first = os.environ.get("RANK", "0") == "0"
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"inner": args.inner, "rng": "invariant"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    text = torch.arange(64).repeat(8, 1) + torch.arange(8)[:, None]
    for step in range(args.steps):
        loss = compiled(text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    if first:
        print(autoshard.programs(model)[-1].explain())


if __name__ == "__main__":
    main()
