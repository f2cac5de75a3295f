"""Rank graphs: few operators, one group, and the unsharded model's answers."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import engine_cases as cases
from autoshard.export import ExportError
from autoshard.export.rank_graph.core_operators import CORE, PRODUCTS
from autoshard.export.rank_graph.operators import attention, update_cache
from autoshard.export.rank_graph.plan import InferencePlan
from autoshard.export.rank_graph.plan import plan_inference as plan_for
from autoshard.export.spec import EngineSpec
from rank_graph_runs import run_plan

SIZES = {operator.add, operator.sub, operator.mul, operator.floordiv}


def plan_inference(model: nn.Module, *args: torch.Tensor, tp: int, **options: Any) -> InferencePlan:
    return plan_for(model, EngineSpec(mesh={"tp": tp}, example=(args, {}), **options))


def logits(name: str, tp: int, length: int | None) -> list[list[torch.Tensor]]:
    feeds = [list(feed.values()) for feed in cases.feeds(length)]
    plan = cases.plan(name, tp, torch.float32, length)
    return [[out[0] for out in rank] for rank in run_plan(plan, cases.model(name), feeds)]


def check(name: str, tp: int, length: int | None) -> None:
    for found in logits(name, tp, length):
        assert cases.error(found, cases.expected(name, length)) < 1e-5


@pytest.mark.slow
def test_llama_with_a_cache_says_what_the_model_says() -> None:
    check("llama", 2, cases.LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, cases.LENGTH])
@pytest.mark.parametrize("name", cases.NAMES)
def test_every_model_says_what_it_says_unsharded(name: str, length: int | None) -> None:
    check(name, 4, length)


def test_a_graph_is_of_few_operators_and_one_group() -> None:
    graph, weights = cases.rank("llama", 2, 1, length=cases.LENGTH)
    nodes = list(graph.module.graph.nodes)
    calls = [n for n in nodes if n.op == "call_function"]
    assert {n.target for n in calls} <= CORE | SIZES | {attention, update_cache, operator.getitem}
    collectives = [n for n in calls if "c10d" in str(n.target)]
    assert {n.args[-1] for n in collectives} == {graph.axis.group}
    attentions = [n for n in calls if n.target is attention]
    assert len(attentions) == 2
    for node in attentions:
        heads = [arg.meta["val"].shape[1] for arg in node.args[:3]]
        assert heads == [4, 2, 2] and node.args[3] is None  # grouped, and no mask
        assert node.kwargs == {"causal": "lower_right", "scale": 8**-0.5}
    own = sum(t.numel() for t in weights.values())
    assert own < 0.55 * sum(p.numel() for p in cases.model("llama").parameters())
    names = ["input_ids", "past_lengths", "last_tokens", "key_cache_0"]
    assert [p.name for p in graph.inputs[:4]] == names
    assert graph.inputs[3].shape == ("batch", 2, cases.LENGTH, 8)


def test_behind_the_last_attention_only_last_tokens_are_computed() -> None:
    graph, _ = cases.rank("llama", 2, 1, length=cases.LENGTH)
    assert graph.outputs[0].shape == ("batch", 1, 256)
    nodes = list(graph.module.graph.nodes)
    (cut,) = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.gather.default]
    behind = [n.meta["val"].shape[1] for n in nodes[cut:] if n.target in PRODUCTS]
    assert behind == [1] * 4  # the MLP of the last layer, and the head
    plan = cases.plan("llama", 2, length=cases.LENGTH)
    every = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, all_logits=True))
    graph = every.rank_graph(1)
    assert graph.outputs[0].shape == ("batch", "sequence", 256)
    assert "last_tokens" not in {port.name for port in graph.inputs}


@pytest.mark.parametrize("length", [pytest.param(None, marks=pytest.mark.slow), 1024])
def test_with_a_cache_ranks_send_activations_not_weights(length: int | None) -> None:
    model = cases.make("llama", num_hidden_layers=1, vocab_size=4096, hidden_size=256)
    dynamic = {"batch": (1, 2, 4), "sequence": (1, 512, 1024)}
    graph = plan_inference(model, tp=2, dynamic=dynamic, max_length=length).rank_graph(0)
    calls = [n for n in graph.module.graph.nodes if "c10d" in str(n.target)]
    weights = [n for n in calls if n.args[0].op == "placeholder"]
    assert calls and bool(weights) == (length is None)  # of whole prompts the weight is smaller


@pytest.mark.parametrize(
    ("window", "causal"), [(16, True), pytest.param(15, False, marks=pytest.mark.slow)]
)
def test_a_window_is_causal_where_no_sequence_is_longer(window: int, causal: bool) -> None:
    model = cases.make("mistral", sliding_window=window, num_hidden_layers=1)
    dynamic = {"batch": (1, 2, 4), "sequence": (1, 8, 16)}
    plan = plan_inference(model, tp=1, dynamic=dynamic)
    graph = plan.rank_graph(0)
    (node,) = graph.module.graph.find_nodes(op="call_function", target=attention)
    assert (node.kwargs["causal"], node.args[3] is None) == (
        ("upper_left", True) if causal else ("none", False)
    )
    if causal:  # within a sequence, not within what a cache of 32 holds
        graph = plan_inference(model, tp=1, dynamic=dynamic, max_length=32).rank_graph(0)
        (node,) = graph.module.graph.find_nodes(op="call_function", target=attention)
        assert node.kwargs["causal"] == "none" and node.args[3] is not None
        return
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        wanted = model(ids).logits
    assert cases.error([run_plan(plan, model, [[ids]])[0][0][0]], [wanted]) < 1e-5


class Odd(nn.Module):
    """A decoder that drops out in eval mode."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, 16), nn.Embedding(64, 16)
        self.dropout = dropout

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True, dropout_p=self.dropout
        )


def test_what_no_engine_can_hold_is_an_error_with_the_line() -> None:
    dynamic = {"batch": (1, 2, 4), "sequence": (1, 8, 16)}
    ids = torch.zeros(2, 8, dtype=torch.long)
    random = plan_inference(Odd(0.5), ids, tp=1, dynamic=dynamic)
    with pytest.raises(ExportError, match="draws random numbers.*test_rank_graph.py:"):
        random.rank_graph(0)
    with pytest.raises(ExportError, match="dynamic size 'tokens' is not known"):
        plan_inference(Odd(0.5), ids, tp=1, dynamic={"tokens": (1, 2, 3)})


@pytest.mark.parametrize(
    ("tp", "sizes"),
    [
        (2, {"vocab_size": 257, "intermediate_size": 99}),
        pytest.param(
            4,
            {"vocab_size": 257, "hidden_size": 66, "num_attention_heads": 6, "head_dim": 10}
            | {"num_key_value_heads": 3},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_size_the_ranks_do_not_divide_is_kept_whole(tp: int, sizes: dict[str, int]) -> None:
    model = cases.make("llama", num_hidden_layers=1, **sizes)
    dynamic = {"batch": (1, 2, 4), "sequence": (1, 8, 16)}
    plan = plan_inference(model, tp=tp, dynamic=dynamic, max_length=32)
    head = plan.program.stored()["lm_head.weight"]
    assert head == ("S(1)" if model.config.hidden_size % tp == 0 else "I")
    ids = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))
    feeds = [
        [ids[:, a:b], *(torch.full((2,), n, dtype=torch.int32) for n in (a, b - a - 1))]
        for a, b in ((0, 7), (7, 8), (8, 12))
    ]
    with torch.no_grad():
        wanted = [part[:, -1:] for part in model(ids).logits.split([7, 1, 4], 1)]
    for found in run_plan(plan, model, feeds):
        assert cases.error([out[0] for out in found], wanted) < 1e-5
