"""schedule_collectives: what starts early, what is waited for late, and what is held at once."""

from __future__ import annotations

import torch

from autoshard.passes.bucketing import ALL_GATHER, ALL_REDUCE, GATHERS, REDUCE_SCATTER
from bucketed import between, compute, program, wait_of


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
