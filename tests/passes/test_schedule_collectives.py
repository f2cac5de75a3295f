"""schedule_collectives: what starts early, what is waited for late, and what is held at once."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import Context
from autoshard.passes.lib.bucketing import (
    ALL_GATHER,
    ALL_REDUCE,
    GATHER_TOGETHER,
    GATHERS,
    REDUCE_SCATTER,
    WAIT,
)
from autoshard.passes.schedule_collectives import ScheduleCollectives
from autoshard.runtime.collectives.axis import Axis
from bucketed import between, compute, program, wait_of


def test_reductions_start_when_ready_and_are_waited_for_late() -> None:
    """All-reduces at the end; a reduce-scatter before the next bucket is put together."""
    for mesh, target in (({"dp_shard": 2}, REDUCE_SCATTER), ({"dp_replicate": 2}, ALL_REDUCE)):
        backward = program(mesh, zero=2, planner={"bucket_bytes": 100_000}).joint.backward
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
    forward = program({"dp_shard": 2}, planner={"bucket_bytes": 100_000}).joint.forward
    starts = [n for n in forward.graph.nodes if n.target in GATHERS]
    assert len(starts) > 4
    for before, start in zip(starts, starts[1:]):
        assert compute(between(forward.graph, wait_of(before), start)) == 0
    for start, second in zip(starts, starts[2:]):
        assert wait_of(start) < second, "more than two buckets are held at once"
    assert all(compute(between(forward.graph, s, wait_of(s))) > 0 for s in starts[1:])


def test_a_gather_of_which_two_do_not_fit_is_not_started_ahead() -> None:
    """Two gathers are held at once only within twice the bucket, or the largest gather."""
    forward = program({"dp_shard": 2}, planner={"bucket_bytes": 1}).joint.forward
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
    backward = program(mesh, zero=2, planner={"bucket_bytes": 100_000}).joint.backward
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


class Gathers:
    """A graph of two inputs, gathered over the axes cp and tp."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(name) for name in "wv"]
        for node in self.inputs:
            node.meta["val"] = torch.empty(8, 8, device="meta")

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(8, 8, device="meta")
        return node

    def schedule(self, *outputs: fx.Node) -> None:
        self.graph.output(outputs)
        gm = fx.GraphModule({}, self.graph)
        ScheduleCollectives(bucket_bytes=1 << 20).run(gm, Context(Axis("tp", 1, 0, "")))
        self.graph.lint()


def test_results_of_a_gather_that_one_over_another_axis_reads_arrive_together() -> None:
    """The second result stands behind the reader of the first one, as merging leaves it."""
    make = Gathers()
    started = make(GATHER_TOGETHER, make.inputs, 2, "cp")
    first = make(WAIT, make(operator.getitem, started, 0))
    whole = make(WAIT, make(ALL_GATHER, first, 2, "tp"))
    second = make(WAIT, make(operator.getitem, started, 1))
    make.schedule(make(torch.ops.aten.mm.default, whole, second))
    assert not [n for n in between(make.graph, first, second) if n.target in GATHERS]


def test_what_gathers_over_two_axes_read_stays_before_both() -> None:
    """One start moves up to each axis' last arrival; the second must not take the source down."""
    make = Gathers()
    arrived = [make(WAIT, make(ALL_GATHER, make.inputs[0], 2, axis)) for axis in ("cp", "tp")]
    source = make(torch.ops.aten.t.default, make.inputs[1])
    starts = [make(ALL_GATHER, source, 2, axis) for axis in ("cp", "tp")]
    product = make(torch.ops.aten.mm.default, *arrived)
    make.schedule(product, *(make(WAIT, start) for start in starts))
    assert all(source < start < product for start in starts)
