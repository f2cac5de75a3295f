"""delay_weight_products: which products run between the start and the wait of a collective."""

from __future__ import annotations

import pytest
from torch import fx

from autoshard.passes.base import Context
from autoshard.passes.delay_weight_products import DelayWeightProducts
from autoshard.passes.lib.bucketing import ALL_REDUCE, REDUCE_SCATTER, last_collectives
from autoshard.program import Program
from bucketed import between, compute, wait_of
from finished_ranks import Layers, layers, megatron, worst_difference


def awaited(program: Program, target: object) -> list[fx.Node]:
    """The collectives of backward that more waits for than the gradient of one weight."""
    backward = program.joint.backward
    assert backward is not None
    gradients = last_collectives(backward.graph, program.axis.group)
    return [n for n in backward.graph.nodes if n.target is target and n not in gradients]


@pytest.mark.parametrize("target", [ALL_REDUCE, REDUCE_SCATTER])
def test_a_columns_gradient_is_reduced_beside_its_weights_product(
    target: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the finished backward graph: start, the weights' products, wait."""
    build, values = layers(Layers(16), (1, 16, 16))
    plan = megatron(build, 2, sequence=target is REDUCE_SCATTER)
    program = build({"tp": 2}, plan=plan)
    starts = awaited(program, target)
    counts = []
    for start in starts:
        assert program.joint.backward is not None
        inside = between(program.joint.backward.graph, start, wait_of(start))
        counts.append(compute(inside))
    layer = [2, 3]  # of gate and up; of q, k and v
    assert counts == [*layer, *(layer if target is ALL_REDUCE else layer[:1])]
    difference, where = worst_difference(build, values, 2, plan=plan)
    assert difference < 1e-5, where
    monkeypatch.setenv("AUTOSHARD_DISABLE", "delay_weight_products")
    plain = build({"tp": 2}, plan=plan)
    assert plain.joint.backward is not None
    graph = plain.joint.backward.graph
    for start in awaited(plain, target):
        assert compute(between(graph, start, wait_of(start))) == 0


def test_it_moves_nothing_twice() -> None:
    build, _ = layers(Layers(16), (1, 16, 16))
    program = build({"tp": 2})
    assert program.joint.backward is not None
    before = [node.name for node in program.joint.backward.graph.nodes]
    report = DelayWeightProducts().run(program.joint.backward, Context(program.axis))
    assert report.hits == 0 and before == [n.name for n in program.joint.backward.graph.nodes]
