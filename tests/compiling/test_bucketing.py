"""What the bucketing passes share; and the counts and bytes of whole programs with all of them.

Whole graphs after all passes: what each value is noted to be, and what stays out of a bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import autoshard
from autoshard.passes.lib.bucketing import GATHER_TOGETHER, kind_of, sort_stable
from autoshard.planning.cost import aligned
from autoshard.program import Program
from bucketed import program
from models import CASES
from models_hf import llama

GATHER = ("forward", "all_gather", "dp_shard")
AGAIN = ("backward", "all_gather", "dp_shard")
SCATTER = ("backward", "reduce_scatter", "dp_shard")
REDUCE = ("backward", "all_reduce", "dp_replicate")


def counts(traced: Program) -> dict[tuple[str, str, str], int]:
    return dict(Counter((c.phase, c.op, c.axis) for c in traced.collectives()))


@pytest.mark.parametrize(
    ("mesh", "zero", "single", "merged"),
    [
        # 21 parameters; the last weight's gather of forward is still there in backward
        ({"dp_replicate": 2}, 3, {REDUCE: 21}, {REDUCE: 1}),
        (
            {"dp_shard": 2},
            3,
            {GATHER: 21, AGAIN: 20, SCATTER: 21},
            {GATHER: 1, AGAIN: 1, SCATTER: 1},
        ),
        ({"dp_shard": 2}, 2, {GATHER: 21, SCATTER: 21}, {GATHER: 1, SCATTER: 1}),
        (
            {"dp_replicate": 2, "dp_shard": 4},
            1,
            {GATHER: 21, SCATTER: 21, REDUCE: 21},
            {GATHER: 1, SCATTER: 1, REDUCE: 1},
        ),
    ],
)
def test_counts(
    mesh: dict[str, int], zero: int, single: dict[Any, int], merged: dict[Any, int]
) -> None:
    assert counts(program(mesh, zero=zero, planner={"bucket_bytes": 1})) == single
    assert counts(program(mesh, zero=zero, planner={"bucket_bytes": None})) == merged


def test_bytes_equal_the_ledger() -> None:
    """Megatron's ledger: ZeRO-3 gathers twice and scatters once what DDP all-reduces once.

    Scattered buckets hold the padded sizes (P' in the ledger): half a norm weight takes 64 places.
    """
    weights = [p.numel() * p.element_size() for p in CASES["llama"].make_model().parameters()]
    total = sum(weights)
    padded = sum(max(nbytes, 2 * 64 * 4) for nbytes in weights)
    for size, scattered in ((1, total), (100_000, padded)):
        moved: Counter[str] = Counter()
        for c in program({"dp_shard": 2}, zero=2, planner={"bucket_bytes": size}).collectives():
            moved[c.op] += c.bytes
        assert moved == {"all_gather": total, "reduce_scatter": scattered}
        ddp = program({"dp_replicate": 2}, planner={"bucket_bytes": size}).collectives()
        assert sum(c.bytes for c in ddp) == total


def test_all_ranks_issue_the_same_collectives() -> None:
    def issued(rank: int) -> list[tuple[str, str, int]]:
        traced = program({"dp_shard": 2, "tp": 2}, rank=rank, planner={"bucket_bytes": 100_000})
        return [(c.op, c.axis, c.bytes) for c in traced.collectives()]

    assert issued(0) == issued(3)  # another on both axes


@pytest.mark.parametrize(
    ("sizes", "ranks", "starts", "total"),
    [
        ([], 2, [], 0),
        ([64, 64], 2, [0, 64], 128),
        ([1, 1, 1], 2, [0, 64, 128], 192),  # 384 in all: a multiple of 128
        ([65, 3], 1, [0, 128], 131),  # an all-reduce
        ([100, 3, 64], 4, [0, 128, 192], 256),
        ([64], 3, [0], 128),  # 3 x 64 is no multiple of 128, 3 x 128 is one of lcm(3, 128)
        ([64, 200], 256, [0, 64], 320),
    ],
)
def test_layout(sizes: list[int], ranks: int, starts: list[int], total: int) -> None:
    """Starts of 64 elements, ends of lcm(ranks, 128): Megatron-Core's distributed optimizer."""
    assert aligned(sizes, ranks) == (starts, total)
    assert ranks == 1 or total * ranks % math.lcm(ranks, 128) == 0


def test_kinds_are_read_off_the_graph() -> None:
    graph = fx.Graph()
    x, plain, shared, stacked = [graph.placeholder(name) for name in "xpse"]
    for node, shape in ((x, (4, 8, 8)), (plain, (8, 8)), (shared, (8, 8)), (stacked, (4, 8, 8))):
        node.meta["val"] = torch.empty(shape, device="meta")
    y = graph.call_function(torch.ops.aten.linear.default, (x, plain))
    y = graph.call_function(torch.ops.aten.linear.default, (y, shared))
    y = graph.call_function(torch.ops.aten.linear.default, (y, shared))
    z = graph.call_function(torch.ops.aten.mul.Tensor, (y, shared))
    turned = graph.call_function(torch.ops.aten.transpose.int, (stacked, 1, 2))
    graph.output((graph.call_function(torch.ops.aten.bmm.default, (z, turned)),))
    assert [kind_of(n) for n in (plain, shared, stacked)] == ["", "tied", "experts"]


def test_sort_stable() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    b = graph.call_function(torch.abs, (x,))
    c = graph.call_function(torch.exp, (x,))
    graph.output((a, b, c))
    a.replace_input_with(x, b)  # now a must come after b
    sort_stable(graph)
    assert [n.name for n in graph.nodes] == ["x", "abs_1", "neg", "exp", "output"]
    graph.lint()


def test_a_weight_that_is_read_by_index_is_gathered_by_itself() -> None:
    """Inductor cannot compile a lookup in the columns of a flat result."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
            self.up = nn.Linear(32, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(self.words(ids))).square().mean()

    ids = torch.zeros(4, 8, dtype=torch.long)
    program = autoshard.trace(Words(), (ids,), mesh={"dp_shard": 2})
    (started,) = [n for n in program.joint.forward.graph.nodes if n.target is GATHER_TOGETHER]
    sizes = [source.meta["val"].numel() for source in started.args[0]]
    assert sizes == [64 * 32 // 2, (32 + 32 + 32 * 32 + 32) // 2]


class Checked(fx.Interpreter):
    """Runs a graph on fake tensors: every value has the shape that the passes noted."""

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        noted = n.meta.get("val")
        if n.op == "call_function" and isinstance(noted, torch.Tensor):
            assert (found.shape, found.dtype) == (noted.shape, noted.dtype), n.format_node()
        return found


MESHES = [
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
]


@pytest.mark.parametrize("mesh", MESHES)
def test_graphs_hold_what_they_note(mesh: dict[str, int]) -> None:
    """With sequence parallelism: the norms' gradients are reduced over tp in one bucket, and then
    over a data-parallel axis."""
    with torch.device("meta"):
        model = llama(hidden_size=256)()
    ids = torch.zeros(1, 512, dtype=torch.long, device="meta")
    program = autoshard.trace(model, kwargs={"input_ids": ids, "labels": ids}, mesh=mesh)
    if "tp" in mesh:
        reduced = [c for c in program.collectives() if (c.op, c.axis) == ("all_reduce", "tp")]
        assert any("bucket of 5" in c.change for c in reduced)
    for gm in (program.joint.forward, program.joint.backward):
        assert gm is not None
        given = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        mode = next(one.fake_mode for one in given if isinstance(one, FakeTensor))
        with mode, torch.no_grad():
            Checked(gm).run(*given)
