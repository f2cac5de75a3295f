"""interleave_halves: one half's products stand between the starts and waits of the other's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.compiling.inductor_order import order_dependencies
from autoshard.passes.bucketing import waits_of
from autoshard.passes.interleave_halves import half_of_each
from autoshard.planning import PRODUCTS, packet
from autoshard.planning.halves import Scheduled, interleave
from finished_ranks import Layers, layers, megatron, worst_difference
from halved import by_sequence, found, windows
from side_by_side import Pair, check


def halved_layer(half: int, first: int) -> list[Scheduled]:
    """Five products, a reduce-scatter, and behind a norm a gather, in numbers from `first`."""
    jobs = [Scheduled(half, 2.0)] * 5
    for start in (first + 5, first + 7):
        jobs += [Scheduled(half, sends=4.0), Scheduled(half, awaits=start)]
    return jobs


def test_a_norm_between_two_collectives_runs_amidst_the_other_halfs_products() -> None:
    jobs: list[Scheduled] = []
    for half in (0, 1):
        for _ in range(3):
            jobs += halved_layer(half, len(jobs))
    order, seconds = interleave(jobs)
    assert sorted(order) == list(range(len(jobs)))
    assert seconds == 2 * 3 * 10.0 + 2 * 4.0, "only the last two collectives are waited for"
    assert [i for i in order if i < 27] == list(range(27)), "a half keeps its order"
    assert interleave(jobs[:27]).seconds == 3 * (10.0 + 2 * 4.0), "alone it waits for each"


def test_what_is_of_neither_half_runs_where_it_stands_once_it_can() -> None:
    """A weight before its first use, a sum of both halves when both are there."""
    jobs = [
        Scheduled(None),
        Scheduled(0, 1.0, inputs=(0,)),
        Scheduled(1, 1.0, inputs=(0,)),
        Scheduled(None, inputs=(1, 2)),
        Scheduled(None),
        Scheduled(0, 1.0, inputs=(1, 4)),
    ]
    assert interleave(jobs).order == [0, 1, 4, 2, 3, 5]


def test_each_collective_is_under_way_while_the_other_half_computes() -> None:
    """In both graphs, with the same bytes in twice as many messages; the first collective of the
    part and the last one, forward and backward, have nothing left to hide behind."""
    build, values = layers(Layers(16), (2, 8, 16))
    plan = megatron(build, 2, sequence=False)
    plain, program = (build({"tp": 2}, plan=plan, overlap_halves=h) for h in (False, True))
    assert found(program).collectives == 8 and found(program).reason == ""
    of = [Counter((c.phase, c.op) for c in one.collectives()) for one in (plain, program)]
    assert of[1] == {kind: 2 * count for kind, count in of[0].items()}
    moved = [sum(c.bytes for c in one.collectives()) for one in (plain, program)]
    assert moved[0] == moved[1]
    for graph in (program.joint.forward, program.joint.backward):
        ones = windows(graph, program.axis.group)
        assert len(ones) == 8 and all(one.other >= 3 for one in ones[:-1]), ones
    assert program.memory().total <= plain.memory().total * 1.02
    said = program.explain(200)
    assert "on two halves of the rows (overlap_halves): 8 changes of state, 16 collectives" in said
    difference, where = worst_difference(build, values, 2, plan=plan, overlap_halves=True)
    assert difference < 1e-5, where


def test_a_gather_and_a_scatter_of_a_half_hide_too() -> None:
    """Sequence parallelism, alone and with the collectives fused where they can be."""
    build, values = layers(Layers(16), (2, 8, 16))
    plan = by_sequence(build, 2)
    plain, program = (build({"tp": 2}, plan=plan, overlap_halves=h) for h in (False, True))
    moved = [sum(c.bytes for c in one.collectives()) for one in (plain, program)]
    assert moved[0] == moved[1] and found(program).collectives == 9
    ones = windows(program.joint.forward, program.axis.group)
    assert {one.op for one in ones} == {"reduce_scatter_tensor", "all_gather_into_tensor"}
    assert sum(one.other > 0 for one in ones) >= len(ones) // 2 - 1
    difference, where = worst_difference(build, values, 2, plan=plan, overlap_halves=True)
    assert difference < 1e-5, where


@pytest.mark.slow
def test_halves_and_fused_collectives_are_both_obeyed() -> None:
    build, values = layers(Layers(16), (2, 8, 16))
    options: dict[str, Any] = {"overlap_halves": True, "fuse_collectives": True}
    plan = by_sequence(build, 2)
    program = build({"tp": 2}, plan=plan, **options)
    assert sum(one.fused for one in program.collectives()) > 20
    difference, where = worst_difference(build, values, 2, plan=plan, **options)
    assert difference < 1e-5, where


def test_inductor_is_told_to_keep_the_order() -> None:
    build, _ = layers(Layers(16), (2, 8, 16))
    program = build({"tp": 2}, plan=megatron(build, 2, sequence=False), overlap_halves=True)
    assert program.joint.backward is not None
    graph = program.joint.backward.graph
    held, half_of = order_dependencies(graph), half_of_each(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    starts = [n for n in graph.nodes if "all_reduce" in str(n.target) and half_of[n] is not None]
    assert len(starts) == 8
    for start in starts[:-1]:
        (wait,) = waits_of(start)
        (last,) = held[wait]
        inside = [n for n in graph.nodes if position[start] < position[n] < position[wait]]
        products = [n for n in inside if packet(n) in PRODUCTS]
        assert start in held[products[0]] and last is products[-1]


class Checkpointed(Layers):
    """Each layer is computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def layer(x: torch.Tensor, each: Any) -> torch.Tensor:
            h = each["norm"](x)
            x = x + each["o"](each["q"](h).tanh() * each["k"](h) + each["v"](h))
            h = each["after"](x)
            y: torch.Tensor = x + each["down"](each["gate"](h).relu() * each["up"](h))
            return y

        for each in self.layers:
            x = checkpoint(layer, x, each, use_reentrant=False)
        return x


def test_halves_are_computed_again_in_backward() -> None:
    """In whatever order the partitioner puts what it computes again."""
    build, values = layers(Checkpointed(16), (2, 8, 16))
    plan = megatron(build, 2, sequence=False)
    options = {"overlap_halves": True, "recompute_collectives": "all"}
    program = build({"tp": 2}, plan=plan, **options)
    ones = windows(program.joint.backward, program.axis.group)
    assert len(ones) > 8 and sum(one.other >= 3 for one in ones) >= len(ones) - 2, ones
    difference, where = worst_difference(build, values, 2, plan=plan, **options)
    assert difference < 1e-5, where


@pytest.mark.slow
def test_inductor_runs_halves_on_two_processes(gloo2: Any) -> None:
    results = gloo2(_trained)
    check(results)
    assert [one["halves"] for one in results] == [8, 8]


def _trained() -> dict[str, Any]:
    model, x = Layers(32), torch.linspace(-1, 1, 64 * 32).sin().view(2, 32, 32).requires_grad_()
    plan = megatron(layers(model, x.shape)[0], 2, sequence=False)
    pair = Pair(model, inner="inductor", overlap_halves=True, plan=plan)
    pair.train([lambda call: call(x).square().mean()] * 2)
    (program,) = autoshard.programs(model)
    return {**pair.result(), "halves": found(program).collectives}
