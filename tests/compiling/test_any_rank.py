"""A graph in which the rank's number is a value: the same text on all ranks, the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoshard
from autoshard.compiling.any_rank import for_any_rank
from autoshard.runtime.collectives import Axis, I, R, S, redistribute
from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.operators import (
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
    vocab_parallel_nll,
)
from autoshard.runtime.randomness import on_shard, shared_seed
from gloo_pool import GlooPool


class Tokens(nn.Module):
    """A table, a layer and a head, with the loss of the tokens themselves."""

    def __init__(self, classes: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(classes, 16)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.table(ids)).relu())
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


IDS = torch.zeros(4, 8, dtype=torch.long)


def texts(
    mesh: dict[str, int], model: nn.Module, x: torch.Tensor = IDS, **options: Any
) -> set[str]:
    """What differs between ranks in the texts of their graphs: one text where nothing does."""
    found = set()
    for rank in range(4 if len(mesh) == 2 else 2):
        program = autoshard.trace(model, (x,), mesh=mesh, rank=rank, **options)
        found.add(for_any_rank(program.graph_module).code)
    return found


def test_ranks_have_one_text() -> None:
    for mesh in ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}):
        assert len(texts(mesh, Tokens())) == 1, mesh
    (text,) = texts({"tp": 2}, Tokens(), planner={"sequence_parallel": True})
    assert "rank_of_tp" in text  # the classes of a rank begin at its number


@pytest.mark.parametrize("rng", ["invariant", "tracker"])
def test_ranks_that_draw_have_one_text(rng: str) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 16))
    x = torch.ones(8, 16)
    (text,) = texts({"tp": 2}, model, x, rng=rng)
    assert "on_shard" in text and "rank_of_tp" in text


def test_what_depends_on_the_number_keeps_it() -> None:
    assert len(texts({"dp_shard": 2}, Tokens(classes=33))) == 2  # ranks hold 17 and 16 rows
    calls: list[tuple[Any, dict[str, Any]]] = [
        (vocab_parallel_embedding, {"rows": 8, "padding_idx": 3}),  # a row of one rank
        (vocab_parallel_embedding, {"rows": 9}),  # 5 and 4 rows
        (on_shard, {"op": "uniform", "dim": 0, "extent": 9}),
        (on_shard, {"op": "uniform", "dim": 0, "extent": 8, "outer": Axis("cp", 2, 0, "")}),
    ]
    for function, given in calls:
        found = set()
        for rank in range(2):
            graph = fx.Graph()
            of = graph.placeholder("table"), graph.placeholder("ids")
            kwargs = {**given, "axis": Axis("tp", 2, rank, "offline:tp")}
            node = graph.call_function(function, of, kwargs)
            node.meta["val"] = torch.empty(())
            graph.output(node)
            found.add(for_any_rank(fx.GraphModule(nn.Module(), graph)).code)
        assert len(found) == 2, given


def test_no_operator_asks_for_the_number_while_it_is_traced() -> None:
    with FakeTensorMode() as mode:
        number = mode.from_tensor(torch.tensor(1))
        given = torch.empty(8, 4), torch.empty(3, dtype=torch.long)
        axis = Axis("tp", 2, number, "offline:tp")
        assert vocab_parallel_embedding(*given, rows=16, axis=axis).shape == (3, 4)


def everything(axis: Axis) -> fx.GraphModule:
    """Of each function that reads the number, one call, and of a constant of the graph: (table,
    ids, x) to sums that read all."""
    graph, root = fx.Graph(), nn.Module()
    root.register_buffer("scale", torch.tensor([1.0, 2.0, 4.0, 8.0]))
    table, ids, x = (graph.placeholder(name) for name in ("table", "ids", "x"))

    def call(function: Any, *args: Any, shape: tuple[int, ...] = (), **kwargs: Any) -> fx.Node:
        node = graph.call_function(function, args, kwargs)
        node.meta["val"] = torch.empty(shape)
        return node

    x.meta["val"] = torch.empty(6, 4)
    found = call(vocab_parallel_embedding, table, ids, rows=8, axis=axis)
    losses = [
        call(vocab_parallel_cross_entropy, x, ids, classes=8, axis=axis),
        call(vocab_parallel_nll, x, ids, classes=8, axis=axis),
    ]
    own = call(redistribute, x, I, S(0), axis, None, shape=(3, 4))
    whole = call(redistribute, own, S(0), R, axis, None, shape=(6, 4))
    back = call(redistribute, whole, R, S(1), axis, None, shape=(6, 2))
    seed, number = call(shared_seed, torch.device("cpu"), axis=axis), call(torch.tensor, 3)
    place = {"op": "dropout", "dim": 0, "extent": 12, "axis": axis}
    drawn = call(on_shard, x, seed, 0.5, number, shape=(6, 4), **place)
    results = (
        found,
        *losses,
        own,
        drawn,
        call(redistribute, back, S(1), I, axis, None, shape=(6, 4)),
    )
    graph.output((*results, call(torch.mul, x, graph.get_attr("scale"))))
    return fx.GraphModule(root, graph)


def run_both() -> list[list[torch.Tensor]]:
    """Results and gradients of the graph of this rank, and of the graph of any rank."""
    (axis,) = init_mesh({"tp": 2}, "cpu").axes
    graph, found = everything(axis), []
    for gm in (graph, for_any_rank(graph)):
        torch.manual_seed(dist.get_rank())
        given = [torch.randn(4, 3, requires_grad=True), torch.randn(6, 4, requires_grad=True)]
        ids = torch.tensor([0, 3, 4, 7, 1, 6])
        results = gm(given[0], ids, given[1])
        sum(one.square().sum() for one in results).backward()
        found.append([*(r.detach() for r in results), *(x.grad for x in given)])
    return found


def test_numbers_are_those_of_the_ranks_own_graph(gloo2: GlooPool) -> None:
    for own, shared in gloo2(run_both):
        assert len(own) == 9
        for got, want in zip(shared, own, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
