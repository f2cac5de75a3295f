"""Prices of pp beside cp, tp and ep, against the program: what stages send (to the byte), hold."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autoshard
from autoshard.building.pipeline.stage_graphs import PipelineStage
from autoshard.building.pipeline.traced import TracedPipeline
from autoshard.compiling import off_meta
from autoshard.compiling.collectives import collectives_of
from autoshard.mesh_search.factorisations import candidates, combined, refusal
from autoshard.mesh_search.prices import MeshPrice
from autoshard.mesh_search.search import search_meshes
from autoshard.passes import after_cut
from autoshard.planning import tensor_bytes, value
from autoshard.planning.cost import cluster, ring_bytes
from autoshard.planning.estimate import Training
from autoshard.runtime import compat
from models import CASES
from models_hf import meta_llama

MICROBATCHES = 4
Axes = dict[str, int]


def llama(samples: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return meta_llama(samples, 512, **sizes, **heads)


def mixtral(samples: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    case = CASES["mixtral"]
    return case.make_model(), {name: t[:samples] for name, t in case.make_batch(0).items()}


def priced_and_traced(mesh: Axes, made: Any, samples: int) -> tuple[MeshPrice, TracedPipeline]:
    """A row of MICROBATCHES batches of so many samples, and the program of all of them."""
    torch.compiler.reset()
    model, batch = made(samples)
    training = Training(microbatches=MICROBATCHES // mesh["pp"])
    found = search_meshes(
        model,
        (),
        batch,
        world=math.prod(mesh.values()),
        mesh=mesh,
        hardware="h100",
        training=training,
    )
    torch.compiler.reset()
    model, batch = made(samples * MICROBATCHES)
    traced: Any = autoshard.trace(
        model,
        kwargs=batch,
        mesh=mesh,
        hardware=found.cluster,
        pipeline={"microbatches": MICROBATCHES},
    )
    return found.rows[0], traced


def sent(traced: TracedPipeline, stage: PipelineStage, mesh: Axes) -> dict[str, float]:
    """Bytes that a rank sends on each axis, of one micro-batch, forward and backward."""
    graph = stage.training(traced.program.microbatch)
    fakes = compat.backend_fakes(list(graph.graph.find_nodes(op="placeholder")))
    graphs = compat.forward_backward(*off_meta(graph, fakes), after_cut)
    axes = [SimpleNamespace(group=f"offline:{name}", name=name) for name in mesh]
    found = dict.fromkeys(mesh, 0.0)
    built: Any = SimpleNamespace(mesh=SimpleNamespace(axes=axes), joint=graphs)
    for one in collectives_of(built):
        found[one.axis] += ring_bytes(one.op, one.bytes, mesh[one.axis])
    return found


@pytest.mark.parametrize(
    ("mesh", "made", "samples"),
    [
        ({"pp": 2, "cp": 2}, llama, 2),
        ({"pp": 2, "cp": 2, "tp": 2}, llama, 2),
        ({"pp": 2, "ep": 2}, mixtral, 1),
    ],
)
def test_stages_send_and_hold_what_the_program_does(mesh: Axes, made: Any, samples: int) -> None:
    row, traced = priced_and_traced(mesh, made, samples)
    assert row.pipeline is not None and row.fits and not row.refused
    assert list(row.pipeline.sent_bytes) == traced.sent_bytes
    microbatch = traced.program.microbatch
    of_rank = dict(zip(microbatch.parameters, microbatch.local.graph.find_nodes(op="placeholder")))
    at_rest = microbatch.at_rest()
    split = "ep" if "ep" in mesh else "cp"
    totals: dict[str, list[float]] = {name: [] for name in mesh if name != "pp"}
    for stage, held, counted in zip(
        traced.program.plan.stages, row.pipeline.memory, traced.memory()
    ):
        own = [microbatch.parameters[i] for i in stage.parameters]
        whole = sum(tensor_bytes(value(of_rank[p])) for p in own if p not in at_rest)
        stays = counted.parameters - whole
        assert held.parameters == whole // mesh[split] + stays
        assert held.gradients == counted.gradients
        assert held.activations == pytest.approx(counted.together, rel=0.15)
        found = sent(traced, stage, mesh)
        for name, each in totals.items():
            # weights are gathered once a call, and their gradients scattered
            once = whole * 2 * (mesh[name] - 1) / mesh[name] if name == split else 0
            each.append(MICROBATCHES * found[name] + once)
    for name, each in totals.items():
        assert row.timing.traffic[name].nbytes == max(each) > 0, name


def test_meshes_with_pp_are_tried_where_a_plan_serves_them() -> None:
    h100 = cluster("h100")
    named = [set(mesh) for mesh in candidates(32, h100, ("cp", "tp", "ep"), stages=True)]
    assert any({"pp", "ep"} <= axes for axes in named)
    assert not any({"pp", "cp"} <= axes for axes in named)  # which has another plan there
    assert {"pp": 2, "cp": 2, "tp": 8} in combined(32, h100)
    assert not any("pp" in mesh for mesh in combined(8, h100))


def test_experts_beside_cp_and_pp_are_priced_and_refused() -> None:
    mesh = {"pp": 2, "ep": 2, "cp": 2}
    assert not refusal(mesh) and "do not travel" in refusal(mesh, mixture=True)
    model, batch = mixtral(1)
    torch.compiler.reset()
    found = search_meshes(model, (), batch, world=8, mesh=mesh, hardware="h100")
    assert found.best is None and "do not travel" in found.rows[0].refused
