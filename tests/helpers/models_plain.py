"""Hand-written modules: what no library's model contains, or contains among much else."""

from __future__ import annotations

from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (defines transformers::grouped_mm_fallback)
from torch import Tensor, nn
from torch.nn import functional as F

from model_case import (
    HEADS,
    HIDDEN,
    LAYERS,
    SEQ,
    VOCAB,
    Batch,
    Case,
    floats,
    images,
    returned_loss,
    seq2seq,
    tokens,
)
from models_hf import llama


class MLP(nn.Module):
    """Two linears and a GELU."""

    def __init__(self, width: int = HIDDEN, inner: int = 4 * HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(x)))
        return y


class Gated(nn.Module):
    """Two products that read one value, and their sum, before and after a norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = ((width, 2 * width), (width, 2 * width), (2 * width, width))
        self.first = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.norm = nn.RMSNorm(width)
        self.second = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.first
        x = self.norm(x + down(gate(x).relu() * up(x)))
        gate, up, down = self.second
        y: torch.Tensor = down(gate(x).relu() * up(x))
        return y


class GatedLayer(nn.Module):
    """A feed-forward with a gate of one of two kinds, a norm and a residual."""

    def __init__(self, other: bool = False, width: int = 8) -> None:
        super().__init__()
        self.gate = torch.tanh if other else torch.sigmoid
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        return x + self.down(y * self.gate(y)) * 0.5


class Regression(nn.Module):
    """A body and the squared error of its output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.body(x), y)


class Parallel(nn.Module):
    """Two branches that are added: their biases have one gradient, which a graph computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.left(x) + self.right(x)))
        return y


class Branch(nn.Module):
    """Takes one of two branches by the value of its input: a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.left, self.right = MLP(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.head(x)
        chosen = self.left if x.sum().item() > 0 else self.right
        y: torch.Tensor = chosen(h)
        return y


class Twice(nn.Module):
    """Calls one block twice, with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = MLP(), nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(self.norm(x + self.block(x)))


class Recurrent(nn.Module):
    """Embedding, a two-layer LSTM and a head, with the cross entropy of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(self.embed(input_ids))
        logits = self.head(h)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


class Translation(nn.Module):
    """torch's own nn.Transformer between an embedding and a head.

    told: whether it is told that its mask is causal; where it is not, it looks at the values of
    the mask, which is a graph break in the middle of the decoder.
    """

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.transformer = nn.Transformer(
            HIDDEN, HEADS, LAYERS, LAYERS, 4 * HIDDEN, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        n = labels.shape[1]
        causal = torch.full((n, n), float("-inf"), device=labels.device).triu(1)
        h = self.transformer(
            self.embed(input_ids),
            self.embed(labels),
            tgt_mask=causal,
            tgt_is_causal=True if self.told else None,
        )
        logits = self.head(h)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm, pooled into a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.head = nn.Linear(32, 8)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(pixel_values).mean((2, 3))), labels)


class Adapter(nn.Module):
    """A frozen linear plus a trained low-rank product."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


def lora() -> nn.Module:
    """A Llama whose attention projections carry adapters and whose own weights are frozen."""
    model = llama()().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(module, name, Adapter(child))
    return model


MIXTURES = ("packed", "interleaved", "two", "one")
"""How an expert's first product is stored: [gate | up], gate and up in turns, two stacks, one."""


class Mixture(nn.Module):
    """`x + experts(x)` of tokens [tokens, hidden], k experts each, chosen by a linear router."""

    def __init__(
        self,
        form: str = "packed",
        biases: bool = False,
        experts: int = 4,
        k: int = 2,
        hidden: int = 8,
        inner: int = 16,
    ) -> None:
        super().__init__()
        self.form, self.k, self.experts = form, k, experts
        width = inner if form in ("one", "two") else 2 * inner
        self.router = nn.Linear(hidden, experts)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) / inner**0.5)
        self.gate = None
        if form == "two":
            self.gate = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.up_bias = nn.Parameter(torch.randn(experts, width)) if biases else None
        self.down_bias = nn.Parameter(torch.randn(experts, hidden)) if biases else None

    def product(self, rows: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
        if stack.dtype == torch.bfloat16:
            return torch._grouped_mm(rows, stack, offs)
        found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, stack, offs)
        return found

    def choice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the router gives, and the experts it chooses: [tokens, k] each."""
        scores = self.router(x).softmax(-1)
        weights, ids = torch.topk(scores, self.k)
        return weights, ids

    def gated(self, rows: Tensor, up: Tensor, offs: Tensor) -> Tensor:
        """What an expert does between its products."""
        if self.form == "one":
            return up.relu()
        if self.gate is not None:
            return F.silu(self.product(rows, self.gate, offs)) * up
        if self.form == "interleaved":
            return F.silu(up[:, ::2].clamp(max=7.0)) * (up[:, 1::2] + 1)
        gate, up = up.chunk(2, -1)
        return F.silu(gate) * up

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen, order = torch.sort(ids.reshape(-1))
        rows = x[order // self.k]
        counts = torch.histc(chosen.float(), self.experts, 0, self.experts - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        up = self.product(rows, self.up, offs)
        if self.up_bias is not None:
            up = up + self.up_bias[chosen]
        out = self.product(self.gated(rows, up, offs), self.down.transpose(-2, -1), offs)
        if self.down_bias is not None:
            out = out + self.down_bias[chosen]
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0], device=order.device)
        return out[place].view(x.shape[0], self.k, -1).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choice(x)
        return x + self.routed(x, weights.to(x.dtype), ids)


class MixtureLoss(nn.Module):
    """The mean square of a mixture after a linear, so that tokens have gradients and a way to be
    split; `extra`: it reads a stack of experts too."""

    def __init__(
        self, form: str = "packed", *, hidden: int = 8, extra: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        self.before, self.extra = nn.Linear(hidden, hidden, bias=False), extra
        self.mixture = Mixture(form, hidden=hidden, **settings)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mixture(self.before(x)).square().mean()
        return found + self.mixture.up.square().mean() if self.extra else found


def vectors(step: int) -> Batch:
    """Inputs and targets [BATCH, SEQ, HIDDEN]; the sum's sign alternates with the step."""
    x = floats(step, SEQ, HIDDEN)
    return {"x": x + (1 if step % 2 else -1), "y": floats(step + 100, SEQ, HIDDEN)}


HAND_WRITTEN = [
    Case("mlp", lambda: Regression(MLP()), vectors, returned_loss),
    Case("parallel", lambda: Regression(Parallel()), vectors, returned_loss),
    Case("branch", lambda: Regression(Branch()), vectors, returned_loss),
    Case("twice", lambda: Regression(Twice()), vectors, returned_loss),
    Case("lstm", Recurrent, tokens, returned_loss),
    Case("transformer", lambda: Translation(told=True), seq2seq, returned_loss),
    Case("transformer_break", lambda: Translation(told=False), seq2seq, returned_loss),
    Case("convnet", Convolutions, images, returned_loss),
    Case("lora", lora, tokens),
]
