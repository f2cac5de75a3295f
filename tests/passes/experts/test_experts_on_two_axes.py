"""The axis ep beside a planned axis: what each way to split a mixture there sends over ep, and
equality with the serial model; and cp beside tp."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autoshard.explain.alternatives import alternatives
from autoshard.planning.cost.model import ring_bytes
from autoshard.planning.mixtures import WAYS, is_mixture, way_of
from autoshard.planning.plan import GraphPlan, Plan, strategy_text
from autoshard.planning.search.asked import fingerprint
from autoshard.program import Program
from autoshard.runtime.operators.bound import unbound
from autoshard.runtime.operators.experts import rows_travel
from autoshard.verification.program_check import verify_program
from models_plain import MixtureLoss
from traced import builder, programs

WHOLE = "whole on every rank"


def fixed(program: Program, way: str, stored: dict[str, str]) -> Plan:
    """A plan that says which way the mixture is split, and how some parameters are stored."""
    (node,) = [n for n in program.serial.graph.nodes if is_mixture(n)]
    text = next(
        strategy_text(one)
        for one in program.decisions.offered[node]
        if (way_of(one) or WHOLE) == way
    )
    axis = program.axis
    graphs = {fingerprint(program.serial): GraphPlan({node.name: text})}
    return Plan(axis.name, axis.size, stored, graphs)


def made(
    model: nn.Module, mesh: dict[str, int], way: str, stored: dict[str, str] | None = None
) -> tuple[Program, float]:
    """A program whose mixture is split that way, and its worst difference from the serial one."""
    x, options = (
        torch.randn(24, 8),
        {"mesh": mesh, "planner": {"bucket_bytes": 1, "ep_exchange": "rows"}},
    )
    (first,), _ = programs(model, (x,), [options])
    torch.compiler.reset()
    plan = fixed(first, way, stored or {})
    (program,), values = programs(model, (x,), [{**options, "plan": plan}])
    ranks = program.mesh.batches
    others = [[torch.randn_like(v) if v is x else v for v in values] for _ in range(ranks - 1)]
    found = verify_program(program, values, others=others)
    return program, found.worst_by_norm[1]


def travels(program: Program) -> bool:
    nodes = program.graph_module.graph.nodes
    return any(axis.name == "ep" for node in nodes for axis in rows_travel(node))


TWO = {"ep": 2, "tp": 2}


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("packed", WAYS[0]),
        ("interleaved", WAYS[2]),
        ("interleaved", WAYS[3]),
        *(
            pytest.param(form, way, marks=pytest.mark.slow)
            for form, way in (("packed", WAYS[1]), ("interleaved", WHOLE))
        ),
    ],
)
def test_every_way_of_tp_goes_with_ep(form: str, way: str) -> None:
    program, difference = made(MixtureLoss(form=form, biases=form != "packed", experts=8), TWO, way)
    assert travels(program) and difference < 1e-5
    assert "tokens and experts split on ep" in program.explain(160)
    split = (
        1 if way in (WAYS[1], WHOLE) else 2
    )  # of the rows, and of the experts whose rows they are
    rows, experts = 24 * 2 * 4 // split, 8 // (2 if way in (WAYS[0], WAYS[3]) else 1)
    on_ep = [one for one in program.collectives() if one.axis == "ep"]
    moved = [one.bytes for one in on_ep if one.op == "all_to_all"]
    assert sorted(moved) == sorted([8 * experts, rows, rows, *[8 * rows] * 4])
    sent = sum(ring_bytes(one.op, one.bytes, 2) for one in on_ep)
    priced = alternatives(program)[0].timing.traffic["ep"].nbytes
    if (form, way) != ("interleaved", WHOLE):  # a bias there is gathered, which is not foreseen
        assert priced == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize(
    ("form", "way"), [("packed", WAYS[1]), ("interleaved", WAYS[2]), ("packed", WHOLE)]
)
def test_stacks_stored_by_experts_on_both_axes(form: str, way: str) -> None:
    """What a rank gathers over tp is then no run of experts."""
    stored = {"mixture.up": "S(0)", "mixture.down": "S(0)"}
    program, difference = made(MixtureLoss(form=form, experts=8), TWO, way, stored)
    assert travels(program) and difference < 1e-5
    mixture = next(n for n in program.graph_module.graph.nodes if rows_travel(n))
    assert unbound(mixture.target)[1]["parts"] == 2


def test_three_axes() -> None:
    mesh = {"dp_shard": 2, "ep": 2, "tp": 2}
    program, difference = made(MixtureLoss(experts=8), mesh, WAYS[0])
    assert travels(program) and difference < 1e-5


@pytest.mark.parametrize("way", [WAYS[2]])
def test_ep_beside_cp(way: str) -> None:
    program, difference = made(MixtureLoss(experts=8), {"ep": 2, "cp": 2}, way)
    assert travels(program) and difference < 1e-5


@pytest.mark.parametrize(
    ("form", "mesh"),
    [
        ("packed", {"cp": 2, "tp": 2}),
        ("interleaved", {"cp": 2, "tp": 2}),
        ("packed", {"ep": 2, "cp": 2, "tp": 2}),
    ],
)
def test_every_way_of_tp_on_the_graph_of_a_rank_of_cp(form: str, mesh: dict[str, int]) -> None:
    """cp splits the tokens and gathers the weights, of which with ep a rank has its experts of each
    part. One expert gets every token."""
    experts = 8 if "ep" in mesh else 6
    model = MixtureLoss(form=form, biases=form != "packed", experts=experts)
    with torch.no_grad():
        model.mixture.router.bias[0] += 100.0
    x = torch.randn(24, 8)
    build = builder(model, (x,))
    first = build(mesh, planner={"ep_exchange": "rows"})
    assert first.outer is not None
    (node,) = [n for n in first.outer.serial.graph.nodes if is_mixture(n)]
    assert way_of(first.outer.decisions.strategies[node]) == WAYS[2]
    for way in (*WAYS, WHOLE):
        plan = replace(first.plan, graphs=fixed(first, way, {}).graphs)
        program = build(mesh, plan=plan, planner={"ep_exchange": "rows"})
        values = [
            model.get_parameter(program.parameters[n]) if n in program.parameters else x
            for n in program.serial.graph.find_nodes(op="placeholder")
        ]
        others = [[torch.randn_like(v) if v is x else v for v in values]] * ("ep" in mesh)
        found = verify_program(program, values, others=others)
        assert found.worst_by_norm[1] < 1e-5, way
        assert travels(program) is ("ep" in mesh)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]])
def test_an_expert_that_gets_everything_and_others_nothing(way: str) -> None:
    model = MixtureLoss(k=1, experts=8)
    with torch.no_grad():
        model.mixture.router.bias[0] += 100.0
    program, difference = made(model, TWO, way)
    assert travels(program) and difference < 1e-5


@pytest.mark.parametrize(("way", "stays"), [(WAYS[0], False), (WAYS[2], True)])
def test_experts_that_the_axes_do_not_divide(way: str, stays: bool) -> None:
    """Six on 2 x 2: a rank of tp has three whole ones, which are gathered over ep; or all six, of
    which a rank of ep has three."""
    program, difference = made(
        MixtureLoss(experts=6), TWO, way, {"mixture.up": "I", "mixture.down": "I"} if stays else {}
    )
    assert travels(program) is stays and difference < 1e-5
    assert ("weights gathered on ep" in program.explain(160)) is not stays
