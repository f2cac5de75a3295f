"""A mixture of experts as it is captured and planned for an engine: every expert on every token.

Tokens stay apart in it, which is what a key-value cache asks of a graph, experts are one dim, which
ranks can split, and no size depends on the data. Which rows are computed in the end is chosen
afterwards (chosen_rows.py).
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.runtime import compat


def all_experts(
    self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A mixture of experts, every expert run on every token: [tokens, hidden] in and out.

    self: a Hugging Face module of experts. chosen, weights: [tokens, k], the experts of each token
    and how much each counts. Experts are the first dim of everything in between, so that they can
    be split over ranks with one all-reduce at the end.
    """
    first = self.gate_up_proj if self.has_gate else self.up_proj
    bias = "gate_up_proj_bias" if self.has_gate else "up_proj_bias"
    inner = _project(self, hidden.unsqueeze(0), first, bias)
    inner = compat.apply_gate(self, inner) if self.has_gate else self.act_fn(inner)
    out = _project(self, inner, self.down_proj, "down_proj_bias")
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    experts = torch.arange(first.shape[0], device=hidden.device)
    picked = chosen.unsqueeze(0) == experts.view(-1, 1, 1)  # [experts, tokens, k]
    share = torch.where(picked, weights.unsqueeze(0), 0).sum(-1, keepdim=True)
    # not a product alone: what an expert says of a token that is not its own may be infinite
    out = torch.where(picked.any(-1, keepdim=True), out, 0)
    return (out * share).sum(0).to(hidden.dtype)


def _project(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: str) -> torch.Tensor:
    out = torch.matmul(x, weight if self.is_transposed else weight.transpose(-1, -2))
    return out + getattr(self, bias).unsqueeze(1) if self.has_bias else out
