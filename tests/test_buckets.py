"""Bucketing and scheduling: counts, bytes and order read off the forward and backward graphs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import autoshard
from autoshard.passes.base import Context
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.buckets import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, sort_stable
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.axis import Axis
from autoshard.runtime.collectives import change
from autoshard.runtime.placement import R, V
from models import CASES


def program(mesh: dict[str, int], **config: Any) -> Program:
    """The tiny Llama's program; traced once for each mesh and configuration."""
    return _program(tuple(mesh.items()), tuple(config.items()))


@functools.cache
def _program(mesh: tuple[Any, ...], config: tuple[Any, ...]) -> Program:
    case = CASES["llama"]
    model, batch = case.make_model(), case.make_batch(0)
    return autoshard.trace(model, (), batch, mesh=dict(mesh), **dict(config))


def counts(traced: Program) -> dict[tuple[str, str, str], int]:
    return dict(Counter((c.phase, c.op, c.axis) for c in traced.collectives()))


GATHER = ("forward", "all_gather", "dp_shard")
AGAIN = ("backward", "all_gather", "dp_shard")
SCATTER = ("backward", "reduce_scatter", "dp_shard")
REDUCE = ("backward", "all_reduce", "dp_replicate")


@pytest.mark.parametrize(
    ("mesh", "zero", "single", "merged"),
    [
        # 21 parameters; the last weight's gather of forward is still there in backward
        ({"dp_replicate": 2}, 3, {REDUCE: 21}, {REDUCE: 1}),
        (
            {"dp_shard": 2},
            3,
            {GATHER: 21, AGAIN: 20, SCATTER: 21},
            {GATHER: 1, AGAIN: 1, SCATTER: 1},
        ),
        ({"dp_shard": 2}, 2, {GATHER: 21, SCATTER: 21}, {GATHER: 1, SCATTER: 1}),
        (
            {"dp_replicate": 2, "dp_shard": 4},
            1,
            {GATHER: 21, SCATTER: 21, REDUCE: 21},
            {GATHER: 1, SCATTER: 1, REDUCE: 1},
        ),
    ],
)
def test_counts(
    mesh: dict[str, int], zero: int, single: dict[Any, int], merged: dict[Any, int]
) -> None:
    assert counts(program(mesh, zero=zero, bucket_bytes=1)) == single
    assert counts(program(mesh, zero=zero, bucket_bytes=None)) == merged


def test_bytes_equal_the_ledger() -> None:
    """Megatron's ledger: ZeRO-3 gathers twice and scatters once what DDP all-reduces once."""
    total = sum(p.numel() * p.element_size() for p in CASES["llama"].make_model().parameters())
    for size in (1, 100_000):
        moved: Counter[str] = Counter()
        for c in program({"dp_shard": 2}, zero=2, bucket_bytes=size).collectives():
            moved[c.op] += c.bytes
        assert moved == {"all_gather": total, "reduce_scatter": total}
        ddp = program({"dp_replicate": 2}, bucket_bytes=size).collectives()
        assert sum(c.bytes for c in ddp) == total


def test_a_bucket_closes_when_it_holds_its_size() -> None:
    """Greedy in the order of use; the tiny Llama's sizes in units of 64 x 64 fp32 weights.

    embedding 4 | norm, q 1, k 1, v 1, o 1, norm | gate 4, up 4, down 4 | ... | norm, head 4
    """
    weight, norm = 64 * 64 * 4, 64 * 4
    found = program({"dp_shard": 2}, bucket_bytes=6 * weight).collectives()
    assert [c.bytes for c in found if c.phase == "forward"] == [
        6 * weight + norm,  # embedding, norm, q, k
        6 * weight + norm,  # v, o, norm, gate
        8 * weight,  # up, down
        8 * weight + 2 * norm,  # norm, q, k, v, o, norm, gate
        8 * weight,  # up, down
        4 * weight + norm,  # norm, head
    ]


def test_backward_gathers_in_its_own_order() -> None:
    found = program({"dp_shard": 2}, bucket_bytes=100_000).collectives()
    gathers = [c.module for c in found if c.phase == "backward" and c.op == "all_gather"]
    layers = [module.split(".")[2] for module in gathers if module.startswith("model.layers.")]
    assert layers == sorted(layers, reverse=True) and len(set(layers)) == 2


def test_gradients_of_norms_on_tp_are_one_bucket() -> None:
    """Weights used as V on tp (norms under sequence parallelism) share one all-reduce."""
    axis = Axis("tp", 4, 0, "offline:tp")
    graph = fx.Graph()
    x, *weights = [graph.placeholder(name) for name in ("x", "w", "v", "u")]
    at = x
    for weight in weights:
        used = graph.call_function(change, (weight, R, V, axis))
        at = graph.call_function(torch.ops.aten.mul.Tensor, (at, used))
    graph.output((at,))
    with FakeTensorMode() as mode:
        fakes = [torch.empty(8, 64)] + [torch.empty(64, requires_grad=True) for _ in weights]
    assert mode is not None
    made = compat.forward_backward(fx.GraphModule({}, graph), fakes)
    assert made.backward is not None
    report = BucketGradients(("offline:tp",)).run(made.backward, Context(axis))
    made.backward.graph.lint()
    reductions = [n for n in made.backward.graph.nodes if n.target is ALL_REDUCE]
    assert report.hits == 3
    assert [tuple(n.meta["val"].shape) for n in reductions] == [(3 * 64,)]


def between(graph: fx.Graph, start: fx.Node, end: fx.Node) -> list[fx.Node]:
    nodes = list(graph.nodes)
    return nodes[nodes.index(start) + 1 : nodes.index(end)]


def compute(nodes: list[fx.Node]) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in nodes)


def wait_of(node: fx.Node) -> fx.Node:
    return next(user for user in node.users if user.target is WAIT)


def test_reductions_start_when_ready_and_are_waited_for_at_the_end() -> None:
    backward = program({"dp_shard": 2}, zero=2, bucket_bytes=100_000).joint.backward
    assert backward is not None
    starts = [n for n in backward.graph.nodes if n.target is REDUCE_SCATTER]
    assert len(starts) == 5
    last_mm = [n for n in backward.graph.nodes if n.target is torch.ops.aten.mm.default][-1]
    for start in starts[:-1]:
        assert compute(between(backward.graph, start, wait_of(start))) > 0
        assert wait_of(start) > last_mm


def test_gathers_start_one_bucket_ahead() -> None:
    forward = program({"dp_shard": 2}, bucket_bytes=100_000).joint.forward
    starts = [n for n in forward.graph.nodes if n.target is ALL_GATHER]
    for before, start in zip(starts, starts[1:]):
        assert start < wait_of(before)
    for start, second in zip(starts, starts[2:]):
        assert wait_of(start) < second, "more than two buckets are held at once"
    assert all(compute(between(forward.graph, s, wait_of(s))) > 0 for s in starts[1:])


def test_all_ranks_issue_the_same_collectives() -> None:
    def issued(rank: int) -> list[tuple[str, str, int]]:
        traced = program({"dp_shard": 2, "tp": 2}, rank=rank, bucket_bytes=100_000)
        return [(c.op, c.axis, c.bytes) for c in traced.collectives()]

    assert issued(0) == issued(1) == issued(2) == issued(3)


def test_sort_stable() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    b = graph.call_function(torch.abs, (x,))
    c = graph.call_function(torch.exp, (x,))
    graph.output((a, b, c))
    a.replace_input_with(x, b)  # now a must come after b
    sort_stable(graph)
    assert [n.name for n in graph.nodes] == ["x", "abs_1", "neg", "exp", "output"]
    graph.lint()
