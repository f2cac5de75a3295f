"""Ranks' graphs under spmd_types, a type checker that nobody here wrote: each gradient that waits
for a reduction gets it. `tests/verification/test_verification.py` shows it the other models."""

from __future__ import annotations

import dataclasses

import pytest
from spmd_types import SpmdTypeError
from torch import fx

import autoshard
from autoshard.program import Program
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.collectives.states import I, P, R
from autoshard.runtime.parameters.data_unsharding import unshard
from gradient_types import check_types
from models import CASES
from traced import WithLoss


def _traced(name: str, **mesh: int) -> Program:
    case = CASES[name]
    return autoshard.trace(WithLoss(case), (case.make_batch(0),), mesh=mesh, hardware="cpu")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("lstm", {"tp": 2}),
        ("llama", {"dp_shard": 2}),
        ("llama", {"dp_shard": 2, "tp": 2}),
        ("convnet", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ("lora", {"dp_replicate": 2, "tp": 2}),
    ],
)
def test_a_graph_type_checks(name: str, mesh: dict[str, int]) -> None:
    program = _traced(name, **mesh)
    assert program.graph_module.graph.find_nodes(op="call_function", target=unshard) or (
        mesh.keys() == {"tp"}
    )
    check_types(program)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("twice", {"tp": 2}), ("llama", {"tp": 2}), ("llama", {"dp_replicate": 2, "tp": 2})],
)
def test_each_dropped_change_is_found(name: str, mesh: dict[str, int]) -> None:
    """Of those that keep the shape: dropping another one is an error of shapes."""
    program = _traced(name, **mesh)
    honest, dropped = program.graph_module, set()
    for index, node in enumerate(honest.graph.nodes):
        if _keeps_the_shape(node):
            faulty = fx.GraphModule(honest, honest.graph.__deepcopy__({}))
            faulty.meta = honest.meta
            spoiled = list(faulty.graph.nodes)[index]
            spoiled.replace_all_uses_with(spoiled.args[0])
            faulty.graph.erase_node(spoiled)
            with pytest.raises(SpmdTypeError):
                check_types(dataclasses.replace(program, graph_module=faulty))
            dropped.add(node.args[1:3] if node.target is redistribute else "unshard")
    assert dropped >= {(P, I), (I, R)}
    assert ("unshard" in dropped) == ("dp_replicate" in mesh)


def _keeps_the_shape(node: fx.Node) -> bool:
    if node.target is unshard:
        return node.args[1] == I
    return node.target is redistribute and node.meta["val"].shape == node.args[0].meta["val"].shape
