"""Small sums of the host's memory in one round of messages: which, and with which result."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.passes.all_reduce_by_all_gather import AllReduceByAllGather
from autoshard.passes.base import Context
from autoshard.passes.lib.bucketing import ALL_GATHER, ALL_REDUCE, WAIT
from autoshard.planning.cost import ONE_SHOT_BYTES
from autoshard.runtime.collectives import Axis

AXIS = Axis("tp", 4, 1, "17")


def reduced(x: torch.Tensor, op: str = "sum", group: str = "17") -> tuple[fx.GraphModule, int]:
    """A graph of one all-reduce of a tensor like `x` after the pass, and the pass's hits."""
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = FakeTensorMode().from_tensor(x)
    node = graph.call_function(ALL_REDUCE, (source, op, group))
    wait = graph.call_function(WAIT, (node,))
    for made in (node, wait):
        made.meta["val"] = source.meta["val"]
    graph.output((wait,))
    gm = fx.GraphModule({}, graph)
    hits = AllReduceByAllGather().run(gm, Context(AXIS)).hits
    gm.graph.lint()
    return gm, hits


@pytest.mark.parametrize("op, oracle", [("sum", "sum"), ("max", "amax"), ("min", "amin")])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_the_result_is_that_of_the_all_reduce(op: str, oracle: str, shape: tuple[int, ...]) -> None:
    """The graph is run with the ranks' parts in the place of the gather."""
    parts = torch.randn(AXIS.size, *shape)
    gm, hits = reduced(parts[1], op)
    assert hits == 1
    wait = next(node for node in gm.graph.nodes if node.target is WAIT)
    assert wait.args[0].target is ALL_GATHER
    gm.register_buffer("parts", parts)
    with gm.graph.inserting_before(wait):
        wait.replace_all_uses_with(gm.graph.get_attr("parts"))
    for node in (wait, wait.args[0]):
        gm.graph.erase_node(node)
    gm.recompile()
    (found,) = gm(parts[1])
    assert found.shape == shape
    torch.testing.assert_close(found, getattr(parts, oracle)(0))


@pytest.mark.parametrize(
    "x, op, group",
    [
        (torch.ones(ONE_SHOT_BYTES // 16 + 1), "sum", "17"),
        (torch.ones(4, device="meta"), "sum", "17"),
        (torch.ones(4, dtype=torch.int64), "sum", "17"),
        (torch.ones(4), "avg", "17"),
        (torch.ones(4), "sum", "another"),
    ],
    ids=["large", "elsewhere", "integers", "a mean", "another axis"],
)
def test_others_stay(x: torch.Tensor, op: str, group: str) -> None:
    gm, hits = reduced(x, op, group)
    assert not hits
    assert [node.target for node in gm.graph.nodes][1:3] == [ALL_REDUCE, WAIT]


def test_up_to_the_bound() -> None:
    assert reduced(torch.ones(ONE_SHOT_BYTES // 16))[1] == 1
