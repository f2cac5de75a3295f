"""How much a bucket holds where the caller says nothing."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.passes.lib.bucketing import ALL_GATHER, WAIT, Member, bucket_size, fill, member


def gathers(count: int, width: int) -> list[Member]:
    """Gathers over two ranks of weights of `width` fp32 elements."""
    graph, found = fx.Graph(), []
    with FakeTensorMode():
        half, whole = torch.empty(width // 2), torch.empty(width)
    for i in range(count):
        source = graph.placeholder(f"w{i}")
        started = graph.call_function(ALL_GATHER, (source, 2, "dp"))
        wait = graph.call_function(WAIT, (started,))
        for node, val in ((source, half), (started, whole), (wait, whole)):
            node.meta["val"] = val
        one = member(started)
        assert one is not None
        found.append(one)
    return found


@pytest.mark.parametrize(
    ("count", "elements", "limit"),
    [
        (4, 1_000, 4 << 20),  # at least 4 MiB
        (32, 1_000_000, 16_000_000),  # an eighth of the model
        (64, 10_000_000, 160_000_000),  # at most 40 million elements
    ],
)
def test_the_default_holds_a_part_of_the_model(count: int, elements: int, limit: int) -> None:
    found = gathers(count, elements)
    assert bucket_size(found) == limit
    buckets = fill(found, None)
    assert [len(bucket) for bucket in buckets] == [min(4, count)] * max(count // 4, 1)
