"""How a model is trained, as the estimate prices it: compiled or not, float8, microbatches, regions
of activation checkpointing, and attention and overlap at rates of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoshard.mesh_search.prices import MeshPrice
from autoshard.mesh_search.search import search_meshes
from autoshard.planning.cost.clusters import Cluster, cluster
from autoshard.planning.cost.machines import Efficiency
from autoshard.planning.estimate.weights import Training
from decoder import Decoder, Shape

SHAPE = Shape(vocab=512, width=256, hidden=1024, layers=3, heads=4, heads_kv=2, length=512)
PERFECT = Efficiency(1.0, 1.0, 1.0, 1.0, attention=1.0, float8=1.0, overlap=1.0)


def row(
    training: Training | None = None,
    shape: Shape = SHAPE,
    efficiency: Efficiency = PERFECT,
    mesh: dict[str, int] | None = None,
    machine: Cluster | None = None,
) -> MeshPrice:
    with torch.device("meta"):
        model = Decoder(shape).to(torch.bfloat16)
        ids = torch.zeros(2, shape.length, dtype=torch.long)
    found = search_meshes(
        model,
        (ids,),
        world=8 if mesh else 1,
        mesh=mesh or {"tp": 1},
        hardware=replace(machine or cluster("h100"), efficiency=efficiency),
        training=training,
    )
    return found.rows[0]


def test_what_is_not_compiled_moves_and_keeps_more() -> None:
    fused, alone = row(), row(Training(compiled=False))
    assert alone.timing.compute > 1.2 * fused.timing.compute
    assert alone.memory.activations > fused.memory.activations
    assert alone.timing.optimizer == fused.timing.optimizer


def test_a_step_of_microbatches_updates_once() -> None:
    one, four = row(), row(Training(microbatches=4))
    assert four.timing.compute == pytest.approx(4 * one.timing.compute)
    assert four.timing.optimizer == one.timing.optimizer
    passes = one.timing.step - one.timing.optimizer
    assert four.timing.step == pytest.approx(4 * passes + one.timing.optimizer)
    assert four.mfu == pytest.approx(4 * one.mfu * one.timing.step / four.timing.step)


def test_float8_is_of_products_with_parameters_but_the_last() -> None:
    # bytes are free, and a float8 product too: what is left is attention and the logits
    base = cluster("h100")
    rates = {**base.device.flops, "float8": 1e30}
    free = replace(base, device=replace(base.device, flops=rates, memory_bandwidth=1e30))
    tokens = 2 * SHAPE.length
    logits = 6 * tokens * SHAPE.width * SHAPE.vocab
    scores = SHAPE.length * (SHAPE.length + 1) // 2
    attention = 4 * 2 * scores * SHAPE.width * SHAPE.layers * 3.5  # its backward takes 2.5 times
    found = row(Training(float8=True), machine=free)
    assert found.timing.compute == pytest.approx((logits + attention) / 989e12, rel=1e-6)


def test_attention_reaches_a_part_of_the_rate_of_products() -> None:
    full, half = row(), row(efficiency=replace(PERFECT, attention=0.01))
    scores = SHAPE.length * (SHAPE.length + 1) // 2
    attention = 4 * 2 * scores * SHAPE.width * SHAPE.layers * 3.5 / 989e12
    assert half.timing.compute == pytest.approx(full.timing.compute + 99 * attention, rel=0.2)


def test_hidden_communication_takes_its_part_of_the_compute() -> None:
    mesh = {"dp_replicate": 8}
    hides = row(mesh=mesh)
    takes = row(mesh=mesh, efficiency=replace(PERFECT, overlap=0.5))
    sent = sum(one.seconds for one in hides.timing.traffic.values())
    hidden = sent - hides.timing.exposed
    assert hidden > 0
    assert takes.timing.step == pytest.approx(hides.timing.step + 0.5 * hidden)


def test_regions_of_the_model_are_computed_again_whatever_fits() -> None:
    rows = {how: row(shape=replace(SHAPE, checkpointing=how)) for how in ("none", "full")}
    rows["selective"] = row(shape=replace(SHAPE, checkpointing="selective"))
    assert rows["none"].recomputation is None
    full, selective = rows["full"].recomputation, rows["selective"].recomputation
    assert full is not None and selective is not None
    assert full.seconds > selective.seconds > 0
    assert full.kept < selective.kept < rows["none"].memory.activations
    assert full.spared > selective.spared > 0
    # a layer's input, the last norm's result, and the logits beside their logarithms: nothing else
    tokens = 2 * SHAPE.length
    most = (SHAPE.layers + 2) * 2 * SHAPE.width + 2 * 4 * SHAPE.vocab
    assert full.kept <= tokens * most
