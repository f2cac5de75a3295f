"""Numbers of random operators as values: those that constants were, kept for backward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_invariant_random import Noisy
from torch import fx, nn
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.building.pipeline.traced import TracedPipeline
from autoshard.runtime.graph_meta import PASS
from autoshard.runtime.randomness.draws import on_microbatch, on_shard
from autoshard.runtime.randomness.philox import DRAWING
from models_plain import GatedLayer
from traced import builder

aten = torch.ops.aten


def counted(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.meta.get("custom", {}).get(PASS) == "number_draws"]


def number(node: Any) -> int:
    """What a chain of additions comes to."""
    if node.target is aten.add.Tensor:
        return number(node.args[0]) + int(node.args[1])
    assert node.target is aten.bitwise_or.Scalar and node.args[1] == -1
    return -1


def calls(gm: fx.GraphModule) -> list[Any]:
    """The number of each draw."""
    found = []
    for node in gm.graph.nodes:
        parts = node.target in (on_shard, on_microbatch)
        name = node.kwargs["op"] if parts else getattr(node.target, "__name__", "")
        drawing = DRAWING.get(name.partition(".")[0])
        if drawing is not None:
            found.append(node.args[drawing.call])
    return found


@pytest.mark.parametrize("rng", ["invariant", "tracker"])
@pytest.mark.parametrize("n", [1, 2])
def test_each_draw_has_the_number_that_it_had(n: int, rng: str) -> None:
    program = builder(Noisy(), (torch.randn(2, 8, 16),))({"tp": n}, rng=rng)
    constants, values = calls(program.serial), calls(program.graph_module)
    assert constants == [*range(12)] and [*map(number, values)] == constants


@pytest.mark.parametrize("tp", [1, 2])
def test_so_has_each_of_a_stage_of_a_pipeline(tp: int) -> None:
    layers = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.Dropout(0.5))]
    model = nn.Sequential(*layers)
    mesh = {"pp": 2, "tp": tp}
    traced = autoshard.trace(model, (torch.ones(6, 8),), mesh=mesh, pipeline={"schedule": "gpipe"})
    assert isinstance(traced, TracedPipeline)
    constants = calls(traced.program.microbatch.local)
    values = [calls(stage) for stage in traced.stages]
    assert all(values) and constants == [*range(4)]
    assert [number(value) for stage in values for value in stage] == constants


class Layers(nn.Module):
    """Checkpointed layers with dropout."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(
                lambda x, layer=layer: nn.functional.dropout(layer(x), 0.1), x, use_reentrant=False
            )
        return x.square().mean()


def test_backward_keeps_the_numbers_that_it_reads() -> None:
    layers = [GatedLayer(False) for _ in range(3)]
    program = builder(Layers(*layers), (torch.ones(4, 6, 8),))({"tp": 2})
    forward, backward = program.joint.forward, program.joint.backward
    assert len(counted(forward)) == 1 + 3 and backward is not None
    drawn = backward.graph.find_nodes(op="call_function", target=torch.ops.autoshard.philox.v1)
    numbers = [node.args[-2] for node in drawn]
    assert len({*numbers}) == 3 and {*numbers} == {*counted(backward)}
    assert {node.op for node in numbers} == {"placeholder"}


@pytest.mark.slow
def test_inductor_fuses_draws_in_backward_too() -> None:
    """It compiles the backward when that is first called."""
    from torch._inductor.graph import GraphLowering

    lowered: list[fx.Graph] = []
    run = GraphLowering.run

    def seen(self: GraphLowering, *args: Any) -> Any:
        lowered.append(self.module.graph)
        return run(self, *args)

    options = {"rng": "invariant", "inner": "inductor"}
    with mock.patch.object(GraphLowering, "run", seen), fresh_cache():
        call = torch.compile(Layers(nn.Linear(8, 8)), backend="autoshard", options=options)
        call(torch.ones(4, 6, 8)).backward()
    compared = [len(g.find_nodes(op="call_function", target=aten.lt.Scalar)) for g in lowered]
    assert len(compared) >= 2 and all(compared)
    assert not any("philox" in str(node.target) for graph in lowered for node in graph.nodes)
