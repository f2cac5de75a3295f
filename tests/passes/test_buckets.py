"""Bucketing and scheduling: counts, bytes and order read off the forward and backward graphs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import autoshard
from autoshard.compiling.inductor_order import IN_PLACE, order_dependencies, reduce_in_place
from autoshard.passes.base import Context
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.bucketing import (
    ALL_GATHER,
    ALL_REDUCE,
    GATHERS,
    KIND,
    REDUCE_SCATTER,
    WAIT,
    aligned,
    kind_of,
    sort_stable,
    waits_of,
)
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import change
from autoshard.runtime.collectives.states import R, V
from autoshard.runtime.compat.aot import forward_backward
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
    """Megatron's ledger: ZeRO-3 gathers twice and scatters once what DDP all-reduces once.

    Scattered buckets hold the padded sizes (P' in the ledger): half a norm weight takes 64 places.
    """
    weights = [p.numel() * p.element_size() for p in CASES["llama"].make_model().parameters()]
    total = sum(weights)
    padded = sum(max(nbytes, 2 * 64 * 4) for nbytes in weights)
    for size, scattered in ((1, total), (100_000, padded)):
        moved: Counter[str] = Counter()
        for c in program({"dp_shard": 2}, zero=2, bucket_bytes=size).collectives():
            moved[c.op] += c.bytes
        assert moved == {"all_gather": total, "reduce_scatter": scattered}
        ddp = program({"dp_replicate": 2}, bucket_bytes=size).collectives()
        assert sum(c.bytes for c in ddp) == total


def test_a_bucket_of_gathers_never_holds_more_than_its_size() -> None:
    """Greedy in the order of use; the tiny Llama's sizes in units of 64 x 64 fp32 weights.

    embedding 4 | norm, q 1, k 1, v 1, o 1, norm | gate 4, up 4, down 4 | ... | norm, head 4
    """
    weight, norm = 64 * 64 * 4, 64 * 4
    full = 6 * weight + norm
    found = program({"dp_shard": 2}, bucket_bytes=full).collectives()
    assert [c.bytes for c in found if c.phase == "forward"] == [
        full,  # embedding, norm, q, k
        full,  # v, o, norm, gate
        4 * weight,  # up
        full,  # down, norm, q, k
        full,  # v, o, norm, gate
        4 * weight,  # up
        4 * weight + norm,  # down, norm
        4 * weight,  # head
    ]


@pytest.mark.parametrize(
    ("sizes", "ranks", "starts", "total"),
    [
        ([], 2, [], 0),
        ([64, 64], 2, [0, 64], 128),
        ([1, 1, 1], 2, [0, 64, 128], 192),  # 384 in all: a multiple of 128
        ([65, 3], 1, [0, 128], 131),  # an all-reduce
        ([100, 3, 64], 4, [0, 128, 192], 256),
        ([64], 3, [0], 128),  # 3 x 64 is no multiple of 128, 3 x 128 is one of lcm(3, 128)
        ([64, 200], 256, [0, 64], 320),
    ],
)
def test_layout(sizes: list[int], ranks: int, starts: list[int], total: int) -> None:
    """Starts of 64 elements, ends of lcm(ranks, 128): Megatron-Core's distributed optimizer."""
    assert aligned(sizes, ranks) == (starts, total)
    assert ranks == 1 or total * ranks % math.lcm(ranks, 128) == 0


def reductions(shapes: list[list[int]], kinds: list[str] | None = None) -> fx.GraphModule:
    """A graph of gradients that are all-reduced one after another and returned."""
    graph = fx.Graph()
    with FakeTensorMode():
        fakes = [torch.empty(shape) for shape in shapes]
    outputs = []
    inputs = [graph.placeholder(f"g{i}") for i in range(len(shapes))]
    for node, fake, kind in zip(inputs, fakes, kinds or [""] * len(shapes), strict=True):
        node.meta["val"] = fake
        started = graph.call_function(ALL_REDUCE, (node, "sum", "offline:dp"))
        started.meta = {"val": fake, "custom": {KIND: kind} if kind else {}}
        waited = graph.call_function(WAIT, (started,))
        waited.meta = {"val": fake}
        outputs.append(waited)
    graph.output(tuple(outputs))
    return fx.GraphModule({}, graph)


def merged(gm: fx.GraphModule, bucket_bytes: int | None) -> list[int]:
    """Elements of each all-reduce after bucketing, in the order of the graph."""
    BucketGradients(("offline:dp",), bucket_bytes).run(gm, Context(Axis("tp", 1, 0, "")))
    gm.graph.lint()
    return [n.meta["val"].numel() for n in gm.graph.nodes if n.target is ALL_REDUCE]


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"),
    [
        # gradients of 64, 100, 1000, 64, 10 elements: those of 400 bytes and more stay alone
        (400, [100, 1000, 64 + 64, 10]),
        (900, [1000, 64 + 128 + 64, 10]),  # 228 elements fill a bucket, the last is left
        (None, [64 + 128 + 1024 + 64 + 10]),
        (1, [64, 100, 1000, 64, 10]),
    ],
)
def test_what_fills_a_bucket_stays_alone(bucket_bytes: int | None, sizes: list[int]) -> None:
    found = merged(reductions([[64], [10, 10], [1000], [64], [10]]), bucket_bytes)
    assert sorted(found) == sorted(sizes)


def test_tied_and_expert_weights_have_buckets_of_their_own() -> None:
    kinds = ["", "tied", "experts", "", "experts", "tied", ""]
    found = merged(reductions([[64]] * 7, kinds), None)
    assert sorted(found) == [128, 128, 192]


def test_kinds_are_read_off_the_graph() -> None:
    graph = fx.Graph()
    x, plain, shared, stacked = [graph.placeholder(name) for name in "xpse"]
    for node, shape in ((x, (4, 8, 8)), (plain, (8, 8)), (shared, (8, 8)), (stacked, (4, 8, 8))):
        node.meta["val"] = torch.empty(shape, device="meta")
    y = graph.call_function(torch.ops.aten.linear.default, (x, plain))
    y = graph.call_function(torch.ops.aten.linear.default, (y, shared))
    y = graph.call_function(torch.ops.aten.linear.default, (y, shared))
    z = graph.call_function(torch.ops.aten.mul.Tensor, (y, shared))
    turned = graph.call_function(torch.ops.aten.transpose.int, (stacked, 1, 2))
    graph.output((graph.call_function(torch.ops.aten.bmm.default, (z, turned)),))
    assert [kind_of(n) for n in (plain, shared, stacked)] == ["", "tied", "experts"]


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
    made = forward_backward(fx.GraphModule({}, graph), fakes)
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
    return min(waits_of(node))


def test_reductions_start_when_ready_and_are_waited_for_late() -> None:
    """All-reduces at the end; a reduce-scatter before the next bucket is put together."""
    for mesh, target in (({"dp_shard": 2}, REDUCE_SCATTER), ({"dp_replicate": 2}, ALL_REDUCE)):
        backward = program(mesh, zero=2, bucket_bytes=100_000).joint.backward
        assert backward is not None
        starts = [n for n in backward.graph.nodes if n.target is target]
        assert len(starts) == 5
        last_mm = [n for n in backward.graph.nodes if n.target is torch.ops.aten.mm.default][-1]
        for start, later in zip(starts, starts[1:]):
            assert compute(between(backward.graph, start, wait_of(start))) > 0
            if target is ALL_REDUCE:
                assert wait_of(start) > last_mm
                continue
            held = between(backward.graph, wait_of(start), later)
            assert compute(held) == 0
            assert any(n.target is torch.ops.aten.cat.default for n in held)


def test_gathers_start_one_bucket_ahead() -> None:
    forward = program({"dp_shard": 2}, bucket_bytes=100_000).joint.forward
    starts = [n for n in forward.graph.nodes if n.target in GATHERS]
    assert len(starts) > 4
    for before, start in zip(starts, starts[1:]):
        assert compute(between(forward.graph, wait_of(before), start)) == 0
    for start, second in zip(starts, starts[2:]):
        assert wait_of(start) < second, "more than two buckets are held at once"
    assert all(compute(between(forward.graph, s, wait_of(s))) > 0 for s in starts[1:])


def test_large_weights_of_a_bucket_are_results_of_their_own() -> None:
    """Waited for together, freed apart, copied nowhere; small ones share one flat result."""
    linears = [torch.nn.Linear(256, 256) for _ in range(3)]
    model = torch.nn.Sequential(*linears, torch.nn.LayerNorm(256))
    traced = autoshard.trace(model, (torch.ones(4, 256),), mesh={"dp_shard": 2})
    graph = traced.joint.forward.graph
    (start,) = [n for n in graph.nodes if n.target in GATHERS]
    (gathered,) = [c for c in traced.collectives() if c.phase == "forward"]
    assert gathered.bytes == sum(p.numel() * 4 for p in model.parameters())
    waits = waits_of(start)
    assert [w.meta["val"].shape for w in waits] == [(256, 256)] * 3 + [(5 * 256,)]
    assert not [n for n in between(graph, min(waits), max(waits)) if n.target is not WAIT]
    assert len({max(wait.users) for wait in waits}) == 4
    reads = {user.target for wait in waits[:3] for user in wait.users}
    assert reads <= {torch.ops.aten.t.default, torch.ops.aten.linear.default}
    assert len([n for n in graph.nodes if n.target is torch.ops.aten.cat.default]) == 1


def test_a_gather_of_which_two_do_not_fit_is_not_started_ahead() -> None:
    """Two gathers are held at once only within twice the bucket, or the largest gather."""
    forward = program({"dp_shard": 2}, bucket_bytes=1).joint.forward
    starts = [n for n in forward.graph.nodes if n.target is ALL_GATHER]
    assert len(starts) == 21
    limit = max(n.meta["val"].nbytes for n in starts)
    for before, start in zip(starts, starts[1:]):
        together = before.meta["val"].nbytes + start.meta["val"].nbytes
        ahead = compute(between(forward.graph, start, wait_of(start))) > 0
        assert not ahead or together <= limit, (before, start)
    assert any(compute(between(forward.graph, start, wait_of(start))) for start in starts)


def test_both_reductions_of_a_hybrid_mesh_overlap() -> None:
    """The outer one takes the inner one's bucket as it is, and starts one bucket later."""
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    backward = program(mesh, zero=2, bucket_bytes=100_000).joint.backward
    assert backward is not None
    graph = backward.graph
    inner = [n for n in graph.nodes if n.target is REDUCE_SCATTER]
    outer = [n for n in graph.nodes if n.target is ALL_REDUCE]
    assert len(inner) == len(outer) == 5
    for scatter, reduce in zip(inner, outer):
        assert reduce.meta["val"].shape == scatter.meta["val"].shape
        source = reduce.args[0]
        assert source.target is torch.ops.aten.div.Tensor and source.args[0] is wait_of(scatter)
    for scatter, following, reduce in zip(inner, inner[1:], outer):
        assert wait_of(scatter) < following < reduce
        assert compute(between(graph, scatter, wait_of(scatter))) > 0
    for reduce in outer[:-2]:
        assert compute(between(graph, reduce, wait_of(reduce))) > 0
    cats = [n for n in graph.nodes if n.target is torch.ops.aten.cat.default]
    assert len(cats) == 5, "the outer reduction copies"


def test_the_order_is_held_by_products() -> None:
    """For Inductor: starts before the next product, waits after the last, in every bucket."""
    backward = program({"dp_shard": 2}, zero=2, bucket_bytes=100_000).joint.backward
    assert backward is not None
    found = order_dependencies(backward.graph)
    starts = [n for n in backward.graph.nodes if n.target is REDUCE_SCATTER]
    for start in starts[:-1]:
        first = next(n for n in between(backward.graph, start, wait_of(start)) if is_product(n))
        assert start in found[first]
        (held,) = found[wait_of(start)]
        assert is_product(held) and start < held < wait_of(start)
        assert all(one < node for node, ones in found.items() for one in ones)
    assert starts[-1] not in found, "nothing is left to overlap with"


def is_product(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


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


def test_an_all_reduce_writes_to_the_bucket_that_only_it_reads() -> None:
    """One that fills a bucket by itself reads a gradient, which others may read too."""
    gm = reductions([[64], [10, 10], [1000], [64], [10]])
    assert sorted(merged(gm, 900)) == [10, 64 + 128 + 64, 1000]
    reduce_in_place(gm.graph)
    targets = [n.target for n in gm.graph.nodes if n.target in (ALL_REDUCE, IN_PLACE)]
    assert Counter(targets) == {IN_PLACE: 1, ALL_REDUCE: 2}
