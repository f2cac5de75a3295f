"""Attention that a model writes out is found, and continued by a cache, whatever it adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.export import EngineSpec
from autoshard.export.rank_graph.cache import check_cached
from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.rank_graph.operators import attention
from autoshard.export.rank_graph.plan import plan_inference
from autoshard.export.rank_graph.weights import read_weights
from autoshard.export.weight_source import WeightSource

HEADS, WIDTH = 4, 32


class Written(nn.Module):
    """A decoder of one layer, its attention in one of many forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.embed, self.head = nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 48)
        self.project, self.sinks = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(HEADS))

    def forward(self, ids: Tensor) -> Tensor:
        b, s = ids.shape
        qkv = self.project(self.embed(ids)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        at = torch.arange(s, device=ids.device)
        seen = at <= at.unsqueeze(1)
        if self.form == "window":
            seen = seen & (at > at.unsqueeze(1) - 3)
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        out = self.attend(q, k, v, mask, at)
        return self.head(out.transpose(1, 2).reshape(b, s, WIDTH))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, at: Tensor) -> Tensor:
        if self.form == "alibi":  # heads joined with the batch
            b, h, s, d = q.shape
            slopes = 2.0 ** -torch.arange(1.0, HEADS + 1, device=q.device)
            bias = (slopes[:, None] * at).view(1, HEADS, 1, s).expand(b, -1, -1, -1)
            scores = torch.baddbmm(
                bias.reshape(b * h, 1, s), q.reshape(-1, s, d), k.reshape(-1, s, d).mT, alpha=0.3
            )
            weights = F.softmax(scores.view(b, h, s, s) + mask, -1)
            return torch.bmm(weights.view(b * h, s, s), v.reshape(-1, s, d)).view(b, h, s, d)
        scores = q @ k.transpose(-1, -2) * 0.3
        if self.form == "softcap":
            scores = torch.tanh(scores / 2.0) * 2.0
        if self.form == "row inside cap":
            scores = torch.tanh(scores - scores.amax(-1, keepdim=True)) * 2.0
        if self.form == "filled":
            scores = scores.masked_fill(mask < 0, float("-inf"))
        elif self.form == "filled, counted from the end":  # as MPT: of a row, all are shifted
            slopes = 3.0 ** -torch.arange(1.0, HEADS + 1, device=q.device)
            bias = slopes.view(-1, 1, 1) * (at - at[-1:])
            hidden = torch.finfo(torch.float32).min
            scores = (scores + bias).masked_fill(mask < 0, hidden)
        else:
            scores = scores + mask
        if self.form == "sinks":
            column = self.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
            scores = torch.cat([scores, column], -1)
            scores = scores - scores.max(-1, keepdim=True).values
            return F.softmax(scores, -1)[..., :-1] @ v
        return F.softmax(scores, -1) @ v


def rank_graph(form: str, **options: Any) -> tuple[RankGraph, Any]:
    model = Written(form).eval()
    spec = EngineSpec(
        mesh={"tp": 1}, dynamic={"batch": (1, 2, 4), "sequence": (1, 8, 8)}, **options
    )
    graph = plan_inference(model, spec).rank_graph(0)
    return graph, read_weights(WeightSource(model), graph)


FILLED = ("filled", "filled, counted from the end")


@pytest.mark.parametrize("form", ["plain", "window", "softcap", "sinks", "alibi", *FILLED])
def test_a_cache_continues_what_was_written_out(form: str) -> None:
    """The whole graph, with which tokens are compared, has attention as the model wrote it."""
    graph, weights = rank_graph(form, max_length=24)
    assert graph.whole is not None
    assert not graph.whole.graph.find_nodes(op="call_function", target=attention)
    found = graph.module.graph.find_nodes(op="call_function", target=attention)
    # no layer has a cap or sinks; these are products and a softmax again, over the cache
    assert len(found) == (0 if form in ("softcap", "sinks") else 1)
    if form in ("plain", "filled"):
        assert found[0].kwargs["causal"] == "lower_right" and found[0].args[3] is None
    check_cached(graph, weights)


def test_what_softmax_does_take_notice_of_is_not_dropped() -> None:
    graph, _ = rank_graph("row inside cap")
    assert not graph.module.graph.find_nodes(op="call_function", target=attention)
