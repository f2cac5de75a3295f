"""What makes Inductor keep the order of the collectives, and reduce buckets in place."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from autoshard.compiling.inductor_order import IN_PLACE, order_dependencies, reduce_in_place
from autoshard.passes.base import Context
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.lib.bucketing import ALL_REDUCE, REDUCE_SCATTER
from autoshard.runtime.collectives.axis import Axis
from bucketed import between, program, reductions, wait_of


def is_product(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def test_the_order_is_held_by_products() -> None:
    """For Inductor: starts before the next product, waits after the last, in every bucket."""
    backward = program({"dp_shard": 2}, zero=2, planner={"bucket_bytes": 100_000}).joint.backward
    assert backward is not None
    found = order_dependencies(backward.graph)
    starts = [n for n in backward.graph.nodes if n.target is REDUCE_SCATTER]
    for start in starts[:-1]:
        first = next(n for n in between(backward.graph, start, wait_of(start)) if is_product(n))
        assert start in found[first]
        (held,) = found[wait_of(start)]
        assert is_product(held) and start < held < wait_of(start)
        assert all(one < node for node, ones in found.items() for one in ones)
    assert starts[-1] not in found, "nothing is left to overlap with"


def test_an_all_reduce_writes_to_the_bucket_that_only_it_reads() -> None:
    """One that fills a bucket by itself reads a gradient, which others may read too."""
    gm = reductions([[64], [10, 10], [1000], [64], [10]])
    BucketGradients(("offline:dp",), 900).run(gm, Context(Axis("tp", 1, 0, "")))
    reduce_in_place(gm.graph)
    targets = [n.target for n in gm.graph.nodes if n.target in (ALL_REDUCE, IN_PLACE)]
    assert Counter(targets) == {IN_PLACE: 1, ALL_REDUCE: 2}
