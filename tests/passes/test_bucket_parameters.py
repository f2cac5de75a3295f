"""bucket_parameters: which gathers are one, what each result is, and which stay."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import autoshard
from autoshard.passes.base import Context
from autoshard.passes.bucket_parameters import BucketParameters
from autoshard.passes.lib.bucketing import ALL_GATHER, GATHER_TOGETHER, GATHERS, WAIT, waits_of
from autoshard.runtime.collectives.axis import Axis
from bucketed import between, program


def test_a_bucket_of_gathers_never_holds_more_than_its_size() -> None:
    """Greedy in the order of use; the tiny Llama's sizes in units of 64 x 64 fp32 weights.

    embedding 4 | norm, q 1, k 1, v 1, o 1, norm | gate 4, up 4, down 4 | ... | norm, head 4
    """
    weight, norm = 64 * 64 * 4, 64 * 4
    full = 6 * weight + norm
    found = program({"dp_shard": 2}, planner={"bucket_bytes": full}).collectives()
    assert [c.bytes for c in found if c.phase == "forward"] == [
        full,  # embedding, norm, q, k
        full,  # v, o, norm, gate
        4 * weight,  # up
        full,  # down, norm, q, k
        full,  # v, o, norm, gate
        4 * weight,  # up
        4 * weight + norm,  # down, norm
        4 * weight,  # head
    ]


def test_backward_gathers_in_its_own_order() -> None:
    found = program({"dp_shard": 2}, planner={"bucket_bytes": 100_000}).collectives()
    gathers = [c.module for c in found if c.phase == "backward" and c.op == "all_gather"]
    layers = [module.split(".")[2] for module in gathers if module.startswith("model.layers.")]
    assert layers == sorted(layers, reverse=True) and len(set(layers)) == 2


class OneRowEach(torch.nn.Module):
    """Weights of which each of two ranks has one row, the first of them as a view takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.Parameter(torch.ones(2, 3, 4))
        self.scale = torch.nn.Parameter(torch.ones(2, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.heads.view(6, 4).view(24)).sum() + self.scale.view(24).sum()


def test_results_of_one_row_a_rank_are_contiguous() -> None:
    """Views were traced of gathers, whose results are."""
    traced = autoshard.trace(OneRowEach(), (torch.ones(3, 24),), mesh={"dp_shard": 2})
    graph = traced.joint.forward.graph
    (start,) = [n for n in graph.nodes if n.target in GATHERS]
    (wait,) = waits_of(start)
    (rows,) = wait.users
    results = []
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default and node.args[0] is not wait:
            source = node.args[0].meta["val"]
            results.append(source.is_contiguous())
    assert len(rows.users) == 2 and len(results) > 1 and all(results)


def test_large_weights_of_a_bucket_are_results_of_their_own() -> None:
    """Waited for together, freed apart, copied nowhere; small ones share one flat result."""
    linears = [torch.nn.Linear(256, 256) for _ in range(3)]
    model = torch.nn.Sequential(*linears, torch.nn.LayerNorm(256))
    traced = autoshard.trace(model, (torch.ones(4, 256),), mesh={"dp_shard": 2})
    graph = traced.joint.forward.graph
    (start,) = [n for n in graph.nodes if n.target in GATHERS]
    (gathered,) = [c for c in traced.collectives() if c.phase == "forward"]
    assert gathered.bytes == sum(p.numel() * 4 for p in model.parameters())
    waits = waits_of(start)
    assert [w.meta["val"].shape for w in waits] == [(256, 256)] * 3 + [(5 * 256,)]
    assert not [n for n in between(graph, min(waits), max(waits)) if n.target is not WAIT]
    assert len({max(wait.users) for wait in waits}) == 4
    reads = {user.target for wait in waits[:3] for user in wait.users}
    assert reads <= {torch.ops.aten.t.default, torch.ops.aten.linear.default}
    assert len([n for n in graph.nodes if n.target is torch.ops.aten.cat.default]) == 1


def gathers(sizes: list[object], group: str = "offline:dp") -> fx.GraphModule:
    """Inputs that two ranks gather one after another; "read": what the one before is added to."""
    graph = fx.Graph()
    results: list[fx.Node] = []
    inputs = [graph.placeholder(f"w{i}") for i in range(len(sizes))]
    for source, size in zip(inputs, sizes, strict=True):
        source.meta["val"] = torch.empty(64 if size == "read" else size, device="meta")  # type: ignore[call-overload]
        if size == "read" and results:
            source = graph.call_function(torch.add, (source, results[-1]))
            source.meta["val"] = torch.empty(64, device="meta")
        started = graph.call_function(ALL_GATHER, (source, 2, group))
        started.meta["val"] = torch.empty(2 * source.meta["val"].numel(), device="meta")
        results.append(graph.call_function(WAIT, (started,)))
        results[-1].meta["val"] = started.meta["val"]
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("sizes", "left", "options"),
    [
        ([64, 8, 200], 1, {}),  # one flat result
        ([64, 8, 200], 3, {"bucket_bytes": 1}),
        ([64, 8, 200], 3, {"apart": "offline:dp"}),  # of the group that stays
        ([64, 8, 200], 2, {"bucket_bytes": 8 * 200}),  # what fills a bucket stays alone
        ([64, 8, "read"], 2, {}),  # made from another's result: its place is not free
    ],
)
def test_which_gathers_are_merged(
    sizes: list[object], left: int, options: dict[str, object]
) -> None:
    gm = gathers(sizes)
    each = BucketParameters(**options)  # type: ignore[arg-type]
    report = each.run(gm, Context(Axis("tp", 1, 0, "")))
    gm.graph.lint()
    starts = [n for n in gm.graph.nodes if n.target in (ALL_GATHER, GATHER_TOGETHER)]
    assert len(starts) == left and (report.hits == 0) == (left == len(sizes))
    assert each.run(gm, Context(Axis("tp", 1, 0, ""))).hits == 0, "a second time it finds nothing"
