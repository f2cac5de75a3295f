"""For each pass a model that shows what it does, and the options that make it run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models_plain import Gated, Mixture


class Reshaped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(4, 2, 8).reshape(8, 8).expand(8, 8)[:]
        return F.dropout(y, 0.0, True).contiguous().relu().detach()


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16, bias=False)
        self.kv = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = self.q(x).view(2, 3, 4, 4), self.kv(x).view(2, 3, 2, 4)
        q, kv = q.transpose(1, 2), kv.transpose(1, 2)
        y: torch.Tensor = F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
        return y


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(2, 4, 4)


class Masked(Grouped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = self.q(x).view(2, 3, 4, 4), self.kv(x).view(2, 3, 2, 4).transpose(1, 2)
        q, kv = q.transpose(1, 2), kv[:, :, None].expand(2, 2, 2, 3, 4).reshape(2, 4, 3, 4)
        mask = torch.arange(3)[:, None] >= torch.arange(3)
        y: torch.Tensor = F.scaled_dot_product_attention(q, kv, kv, mask)
        return y


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x * self.w, 0.5, True)
        return y + torch.rand_like(y)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x).relu())
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, 2, dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rnn(x)[0]
        return y


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), torch.arange(4))


class Projected(nn.Module):
    """A product that float8 kernels take, and one that makes logits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(32, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.a(x))
        return y


class Served(nn.Module):
    """A layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 8, bias=False)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(x + self.b(self.a(x).relu())))
        return y


class Next(nn.Module):
    """A loss of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits, labels = self.head(x)[:, :-1], (x[:, 1:, 0] > 0).long()
        return F.cross_entropy(logits.reshape(-1, 4), labels.reshape(-1))


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).view(-1, 4), (x[..., 0] > 0).long().view(-1))


# pass -> (model, input, mesh, the graph it works on)
SAMPLES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int], str]] = {
    "canonicalize": (Reshaped, (8, 8), {"tp": 2}, ""),
    "recover_masks": (Masked, (2, 3, 16), {"tp": 2}, ""),
    "expand_grouped_heads": (Grouped, (2, 3, 16), {"tp": 4}, ""),
    "split_recurrent": (Recurrent, (3, 2, 4), {"tp": 2}, ""),
    "match_experts": (lambda: Mixture("one"), (6, 8), {"tp": 2}, ""),
    "invariant_random": (Random, (4, 8), {"tp": 2}, ""),
    "unflatten_products": (Flattened, (2, 4, 8), {"cp": 2}, ""),
    "float8_products": (Projected, (4, 32), {"tp": 2}, ""),
    "shift_labels": (Next, (2, 6, 8), {"cp": 2}, ""),
    "unflatten_losses": (Scored, (2, 6, 8), {"cp": 2}, ""),
    "localize": (Two, (4, 8), {"tp": 2}, ""),
    "exchange_experts": (lambda: Mixture("one"), (6, 8), {"ep": 2}, ""),
    "data_parallel": (Two, (4, 8), {"dp_replicate": 2, "dp_shard": 2}, ""),
    "global_token_mean": (Classifier, (4, 8), {"dp_replicate": 2}, ""),
    "fuse_inference_layers": (Served, (2, 8), {"tp": 2}, ""),
    "chunk_loss": (Scored, (2, 6, 8), {"dp_replicate": 2}, ""),
    "number_draws": (Random, (4, 8), {"tp": 2}, ""),
    "bucket_parameters": (Two, (4, 8), {"dp_shard": 2}, "forward"),
    "fuse_collectives": (lambda: Gated(64), (512, 64), {"tp": 2}, "forward"),
    "delay_weight_products": (Gated, (4, 8), {"tp": 2}, "backward"),
    "bucket_gradients": (Two, (4, 8), {"dp_shard": 2}, "backward"),
    "schedule_collectives": (Two, (4, 8), {"dp_shard": 2}, "backward"),
    "reduce_scatter_by_all_to_all": (Two, (4, 8), {"dp_shard": 2}, "backward"),
    "all_reduce_by_all_gather": (Two, (4, 8), {"tp": 2}, "forward"),
}


OPTIONS: dict[str, dict[str, Any]] = {
    "float8_products": {"precision": {"matmul": "float8"}},
    "global_token_mean": {"gradients": {"loss_tokens": "global"}},
    "chunk_loss": {"memory": {"chunk_loss": True}},
    "exchange_experts": {"planner": {"ep_exchange": "rows"}},
    "fuse_collectives": {"planner": {"fuse_collectives": True}, "outputs": "sharded"},
}
