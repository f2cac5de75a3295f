"""fuse_collectives: what becomes one operator, with which numbers and bytes, and what does not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.passes.base import Context, Report
from autoshard.passes.fuse_collectives import FuseCollectives
from autoshard.planning.cost import Fusing, cluster
from autoshard.runtime.collectives import FUSED_PRODUCTS, Axis, I, P, S, all_gather, convert
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.graph_meta import CHANGE
from finished_ranks import Layers, OnRank, layers, megatron, worst_difference
from side_by_side import Pair, check

RANKS = 2
AXIS = Axis("tp", RANKS, 0, "offline:tp")
Function = Callable[..., Any]


def whole(x: torch.Tensor, dim: int) -> torch.Tensor:
    return convert(x, S(dim), I, AXIS)


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return convert(x, P, S(dim), AXIS)


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def fused(
    run: Function,
    shapes: list[tuple[int, ...]],
    fusing: Fusing = Fusing(True),  # noqa: B008
) -> tuple[fx.GraphModule, Report]:
    """The graph of a function of a rank's tensors, after the pass."""
    gm = make_fx(run, tracing_mode="fake")(*map(torch.ones, shapes))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor):
        node.meta["custom"] = {CHANGE: "bias: I -> P"}
    machine = cluster("h100")
    one = FuseCollectives(fusing, machine, machine.inside)
    return gm, one.run(gm, Context(AXIS))


# A function of one rank's tensors, their shapes, and how many collectives are fused.
FUSED: dict[str, tuple[Function, list[tuple[int, ...]], int]] = {
    "one product": (lambda x, w: whole(x, 0) @ w, [(4, 6), (6, 5)], 1),
    "a bias": (lambda x, w, b: torch.addmm(b, whole(x, 0), w), [(4, 6), (6, 5), (5,)], 1),
    "an inner dim": (lambda x, w: rows(whole(x, 1)) @ w, [(3, 4, 6), (6, 5)], 1),
    "four dims": (lambda x, w: rows(whole(x, 2)) @ w, [(3, 2, 4, 6), (6, 5)], 1),
    "one row a rank": (lambda x, w: rows(whole(x, 1)) @ w, [(3, 1, 6), (6, 5)], 1),
    "a batch of one": (lambda x, w: rows(whole(x, 1)) @ w, [(1, 4, 6), (6, 5)], 1),
    "several products and other readers": (
        lambda x, w, v: (
            (g := rows(whole(x, 1))) @ w,
            g @ (v * 2),  # a factor that is made later
            torch.eye(24).T @ g,
            g.T @ g,
            g.sum(),
            g,
        ),
        [(3, 4, 6), (6, 5), (6, 7)],
        1,
    ),
    "the gradient of a weight": (
        lambda g, w, x: ((a := rows(whole(g, 1))) @ w, a.t() @ x),
        [(3, 4, 6), (6, 5), (24, 5)],
        1,
    ),
    "a scattered product": (lambda x, w: part(x @ w, 0), [(8, 6), (6, 5)], 1),
    "along an inner dim": (
        lambda x, w: part((x @ w).view(3, 8, 5), 1),
        [(24, 6), (6, 5)],
        1,
    ),
    "an equal share of a bias": (
        lambda x, w, b: part(torch.addmm(b / RANKS, x, w), 0),
        [(8, 6), (6, 5), (5,)],
        1,
    ),
    "a sum of products": (
        lambda x, y, z, w: part(
            ((x @ w).view(3, 8, 5) + (y @ w).view(3, 8, 5)) + (z @ w[:4]).view(3, 8, 5), 1
        ),
        [(24, 6), (24, 6), (24, 4), (6, 5)],
        1,
    ),
    "one after the other": (
        lambda x, w, v: part((rows(whole(x, 1)) @ w).relu() @ v, 0),
        [(3, 4, 6), (6, 5), (5, 6)],
        2,
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_the_numbers_stay(name: str) -> None:
    """On two ranks, in every spelling of views, gathers and sums that a layer comes in."""
    run, shapes, count = FUSED[name]
    plain = make_fx(run, tracing_mode="fake")(*map(torch.ones, shapes))
    gm, report = fused(run, shapes)
    assert (report.hits, report.skips) == (count, [])
    targets = [str(node.target) for node in gm.graph.nodes]
    assert not any("_c10d" in target for target in targets)
    torch.manual_seed(0)
    own = [[torch.randn(shape) for shape in shapes] for _ in range(RANKS)]
    given = [[a if a.dim() > 1 else b for a, b in zip(each, own[0])] for each in own]
    results = [
        run_ranks(RANKS, lambda axis, one=one: OnRank(one, axis).run(*given[axis.rank]))
        for one in (plain, gm)
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    before = [node.name for node in gm.graph.nodes]
    again = FuseCollectives(Fusing(True), cluster("h100"), cluster("h100").inside)
    assert again.run(gm, Context(AXIS)).hits == 0
    assert before == [node.name for node in gm.graph.nodes]


DECLINED: dict[str, tuple[Function, list[tuple[int, ...]], str]] = {
    "a cast": (lambda x, w: whole(x, 0).double() @ w.double(), [(4, 6), (6, 5)], r"\(_to_copy\)"),
    "summed over": (lambda x, w: whole(x, 1) @ w, [(8, 3), (6, 5)], r"for a factor \(mm\)"),
    "a weight": (lambda w, x: x @ whole(w, 0), [(4, 6), (5, 8)], r"for a factor \(mm\)"),
    "padded": (
        lambda x, w: convert(x, S(0), I, AXIS, 7) @ w,
        [(4, 6), (6, 5)],
        "padded, since the ranks do not divide them",
    ),
    "padded sums": (lambda x, w: part(x @ w, 0), [(7, 6), (6, 5)], "padded, since the ranks"),
    "in the order of ranks": (
        lambda x, w: ((g := all_gather(x, AXIS)).exp(), rows(g.view(2, 3, 4, 6).movedim(0, 1)) @ w),
        [(3, 4, 6), (6, 5)],
        "read in the order of ranks, too",
    ),
    "a sum that is scaled": (lambda x, w: part(x @ w * 2, 0), [(8, 6), (6, 5)], "made by mul"),
    "a sum that is read": (
        lambda x, w: ((y := x @ w), part(y, 0)),
        [(8, 6), (6, 5)],
        "2 operators read what is summed",
    ),
    "a bias of each rank's own": (
        lambda x, w, b: part(torch.addmm(b, x, w), 0),
        [(8, 6), (6, 5), (5,)],
        "no equal share of one bias",
    ),
    "columns": (lambda x, w: part(x @ w, 1), [(8, 6), (6, 4)], "none of the rows of a product"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_stays_apart_says_why(name: str) -> None:
    run, shapes, reason = DECLINED[name]
    gm, report = fused(run, shapes)
    assert report.hits == 0
    (skip,) = report.skips
    assert re.search(reason, skip.reason), skip.reason
    assert not any(node.target in FUSED_PRODUCTS for node in gm.graph.nodes)


def test_only_what_gains_by_it_is_fused() -> None:
    """Where a size is chosen by cost: 512 rows of 4096 on two H100s, and not 64."""
    for tokens, hits in ((64, 0), (2048, 1)):
        run: Function = lambda x, w: whole(x, 0) @ w  # noqa: E731
        with torch.device("meta"):
            gm, report = fused(run, [(tokens // 2, 4096), (4096, 2048)], Fusing())
        assert report.hits == hits, report
    small = fused(run, [(32, 64), (64, 64)], Fusing())[1]
    assert "us of products spare less than the 20 us that it takes" in small.skips[0].reason


def test_a_dense_block_has_no_gather_apart_and_sends_what_it_sent() -> None:
    """Forward and every gradient of two layers; bytes and kinds of the collectives are those of
    the plan without it."""
    build, values = layers(Layers(16), (1, 16, 16))
    plan = megatron(build, 2, sequence=True)
    plain, program = (
        build({"tp": 2}, plan=plan, planner={"fuse_collectives": f}) for f in (False, True)
    )
    moved = [
        Counter((c.phase, c.op, c.bytes) for c in one.collectives()) for one in (plain, program)
    ]
    assert moved[0] == moved[1]
    found = Counter((c.phase, c.op) for c in program.collectives() if c.fused)
    assert found == {  # the input of the first norm is whole on every rank
        ("forward", "all_gather"): 3,
        ("forward", "reduce_scatter"): 4,
        ("backward", "all_gather"): 4,
        ("backward", "reduce_scatter"): 3,
    }
    activation = 16 * 16 * 4
    gathers = [c for c in program.collectives() if c.op == "all_gather" and c.bytes >= activation]
    apart = [c for c in gathers if not c.fused]
    assert [c.phase for c in apart] == ["forward"], "but for the output, which is asked for whole"
    difference, where = worst_difference(
        build, values, 2, plan=plan, planner={"fuse_collectives": True}
    )
    assert difference < 1e-5, where
    said = program.explain(160)
    assert "one operator with the products beside them: 4 all_gather backward" in said
    assert "apart from products" in said and "(output)" in said


@pytest.mark.slow
def test_inductor_runs_it_on_two_processes(gloo2: Any) -> None:
    results = gloo2(_trained)
    check(results)
    assert [one["fused"] for one in results] == [14, 14]


def _trained() -> dict[str, Any]:
    model, x = Layers(32), torch.linspace(-1, 1, 64 * 32).sin().view(1, 64, 32).requires_grad_()
    plan = megatron(layers(model, x.shape)[0], 2, sequence=True)
    pair = Pair(model, inner="inductor", planner={"fuse_collectives": True}, plan=plan)
    pair.train([lambda call: call(x).square().mean()] * 2)
    (program,) = autoshard.programs(model)
    return {**pair.result(), "fused": sum(one.fused for one in program.collectives())}
