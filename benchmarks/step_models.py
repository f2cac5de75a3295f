"""The models of world_one.py: a Llama, a vision transformer and a mixture of experts, and a batch.

All are plain PyTorch: a machine that has only torch runs them, without a download.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from llama_model import Llama, Shape, WithLoss

SHAPES = {
    "cpu": Shape(layers=4),
    "cuda": Shape(vocab=32_000, width=2048, hidden=5504, layers=8, heads=16, length=2048),
}
EXPERTS, CHOSEN = 8, 2


class VisionTransformer(nn.Module):
    """Images [batch, 3, side, side] to the mean loss of a constant class, patches of 16."""

    def __init__(self, shape: Shape, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, 16, stride=16)
        self.positions = nn.Parameter(torch.zeros((side // 16) ** 2, shape.width))
        layer = nn.TransformerEncoderLayer(
            shape.width,
            shape.heads,
            4 * shape.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).mT + self.positions
        logits = self.head(self.encoder(x).mean(1))
        return F.cross_entropy(logits, logits.new_zeros(logits.shape[0], dtype=torch.long))


class Mixture(nn.Module):
    """A gated feed-forward of 8 experts, of which each token goes through 2: rows sorted by expert
    and two grouped products, in bfloat16, as mixtures are written for training."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden // 2 // 16 * 16
        self.router = nn.Linear(shape.width, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(
            torch.randn(EXPERTS, shape.width, 2 * hidden) / shape.width**0.5
        )
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, shape.width) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        expert, order = chosen.flatten().sort(stable=True)
        ends = (expert[:, None] == torch.arange(EXPERTS, device=x.device)).sum(0).cumsum(0)
        ends = ends.to(torch.int32)
        rows = tokens[order // CHOSEN].to(torch.bfloat16)
        gate, up = torch._grouped_mm(rows, self.gate_up.to(torch.bfloat16), ends).chunk(2, -1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.to(torch.bfloat16), ends)
        out = out.to(x.dtype) * weights.flatten()[order, None]
        mixed = torch.zeros_like(tokens).index_add(0, order // CHOSEN, out)
        return mixed.view_as(x)


def llama(device: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    shape = SHAPES[device]
    return WithLoss(Llama(shape)), torch.randint(shape.vocab, (batch, shape.length))


def vit(device: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    shape, side = (
        (Shape(width=192, layers=4, heads=3), 64)
        if device == "cpu"
        else (Shape(width=1024, layers=24, heads=16), 224)
    )
    return VisionTransformer(shape, side), torch.randn(16 * batch, 3, side, side)


def mixture(device: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    shape = Shape(layers=2) if device == "cpu" else SHAPES[device]
    model = Llama(shape)
    for block in model.blocks:
        block.mlp = Mixture(shape)
    return WithLoss(model), torch.randint(shape.vocab, (batch, shape.length))


MODELS: dict[str, Callable[[str, int], tuple[nn.Module, torch.Tensor]]] = {
    "llama": llama,
    "vit": vit,
    "mixture": mixture,
}
