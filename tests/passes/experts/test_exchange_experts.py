"""The axis ep: which mixtures exchange rows, what that sends, equality with the serial model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.explain.alternatives import alternatives
from autoshard.planning.cost.model import ring_bytes
from autoshard.program import Program
from autoshard.runtime.operators.bound import unbound
from autoshard.runtime.operators.experts import exchanged_experts
from autoshard.verification.program_check import verify_program
from models_plain import MixtureLoss
from traced import programs


def made(model: nn.Module, mesh: dict[str, int], **options: Any) -> tuple[Program, float]:
    """A program and its worst difference from the serial graph, on a batch for each rank."""
    x = torch.randn(24, 8)
    given = {"mesh": mesh, "planner": {"bucket_bytes": 1, "ep_exchange": "rows"}, **options}
    (program,), values = programs(model, (x,), [given])
    ranks = math.prod(mesh.values())
    others = [[torch.randn_like(v) if v is x else v for v in values] for _ in range(ranks - 1)]
    found = verify_program(program, values, others=others)
    return program, found.worst_by_norm[1]


def exchanges(program: Program) -> int:
    nodes = program.graph_module.graph.nodes
    return sum(unbound(node.target)[0] is exchanged_experts for node in nodes)


@pytest.mark.parametrize(
    "mesh", [{"ep": 2}, {"dp_shard": 2, "ep": 2}, {"dp_replicate": 2, "ep": 3}]
)
def test_experts_stay_and_everything_else_is_gathered(mesh: dict[str, int]) -> None:
    """Of five experts, which no axis divides: rows of a rank's 24 tokens travel there and back,
    in forward and in backward; no stack moves over ep, nor its gradient."""
    program, difference = made(MixtureLoss(form="interleaved", biases=True, experts=5), mesh)
    assert exchanges(program) == 1 and difference < 1e-5
    stacks = ("up", "down", "up_bias", "down_bias")
    assert all(
        program.data[node]["ep"] == "S(0)"
        for node, name in program.parameters.items()
        if name.rpartition(".")[2] in stacks
    )
    on_ep = [one for one in program.collectives() if one.axis == "ep"]
    rows, experts = 24 * 2 * 4, -(-5 // mesh["ep"]) * mesh["ep"]
    moved = [one.bytes for one in on_ep if one.op == "all_to_all"]
    assert sorted(moved) == sorted([8 * experts, rows, rows, *[8 * rows] * 4])
    largest = max(one.bytes for one in on_ep if one.op != "all_to_all")
    assert largest <= 4 * 8 * 9  # of the linear before, its rows padded
    priced = alternatives(program)[0].timing.traffic
    for axis, ranks in mesh.items():
        every = [one for one in program.collectives() if one.axis == axis]
        sent = sum(ring_bytes(one.op, one.bytes, ranks) for one in every)
        assert priced[axis].nbytes == pytest.approx(sent, rel=0.05), axis  # which pads fives
    text = program.explain(160)
    assert "tokens and experts split on ep" in text and "rows to their experts and back" in text
    assert "the host waits for the counts of rows" in text


@pytest.mark.parametrize("settings", [{"experts": 2}, {"extra": True}])
def test_what_cannot_stay_is_gathered(settings: dict[str, Any]) -> None:
    program, difference = made(MixtureLoss(**settings), {"ep": 3})
    assert exchanges(program) == 0 and difference < 1e-5
    assert "weights gathered on ep" in program.explain(160)


def test_an_expert_that_gets_everything_and_others_nothing() -> None:
    """Gradients of the others are zeros on the ranks that hold them, not missing."""
    model = MixtureLoss(k=1)
    with torch.no_grad():
        model.mixture.router.bias[0] += 100.0
    program, difference = made(model, {"ep": 2})
    assert exchanges(program) == 1 and difference < 1e-5
