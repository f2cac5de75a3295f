"""bucket_gradients: which reductions are one, and which stay."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.passes.base import Context
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.lib.bucketing import ALL_REDUCE
from autoshard.passes.pipeline import after_cut
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.collectives.states import I, R
from autoshard.runtime.compat.aot import forward_backward
from bucketed import reductions


def merged(gm: fx.GraphModule, bucket_bytes: int | None) -> list[int]:
    """Elements of each all-reduce after bucketing, in the order of the graph."""
    BucketGradients(("offline:dp",), bucket_bytes).run(gm, Context(Axis("tp", 1, 0, "")))
    gm.graph.lint()
    return [n.meta["val"].numel() for n in gm.graph.nodes if n.target is ALL_REDUCE]


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"),
    [
        # gradients of 64, 100, 1000, 64, 10 elements: those of 400 bytes and more stay alone
        (400, [100, 1000, 64 + 64, 10]),
        (900, [1000, 64 + 128 + 64, 10]),  # 228 elements fill a bucket, the last is left
        (None, [64 + 128 + 1024 + 64 + 10]),
        (1, [64, 100, 1000, 64, 10]),
    ],
)
def test_what_fills_a_bucket_stays_alone(bucket_bytes: int | None, sizes: list[int]) -> None:
    found = merged(reductions([[64], [10, 10], [1000], [64], [10]]), bucket_bytes)
    assert sorted(found) == sorted(sizes)


def test_tied_and_expert_weights_have_buckets_of_their_own() -> None:
    kinds = ["", "tied", "experts", "", "experts", "tied", ""]
    found = merged(reductions([[64]] * 7, kinds), None)
    assert sorted(found) == [128, 128, 192]


def test_gradients_of_norms_on_tp_are_one_bucket() -> None:
    """Weights used as R on tp (norms under sequence parallelism) share one all-reduce."""
    axis = Axis("tp", 4, 0, "offline:tp")
    graph = fx.Graph()
    x, *weights = [graph.placeholder(name) for name in ("x", "w", "v", "u")]
    at = x
    for weight in weights:
        used = graph.call_function(redistribute, (weight, I, R, axis))
        at = graph.call_function(torch.ops.aten.mul.Tensor, (at, used))
    graph.output((at,))
    with FakeTensorMode() as mode:
        fakes = [torch.empty(8, 64)] + [torch.empty(64, requires_grad=True) for _ in weights]
    assert mode is not None
    made = forward_backward(fx.GraphModule({}, graph), fakes, after_cut)
    assert made.backward is not None
    report = BucketGradients(("offline:tp",)).run(made.backward, Context(axis))
    made.backward.graph.lint()
    reductions = [n for n in made.backward.graph.nodes if n.target is ALL_REDUCE]
    assert report.hits == 3
    assert [tuple(n.meta["val"].shape) for n in reductions] == [(3 * 64,)]


def test_a_reduction_that_is_read_stays() -> None:
    gm = reductions([[64], [10, 10], [32]])
    (first, *_) = gm.graph.output_node().all_input_nodes
    with gm.graph.inserting_before(gm.graph.output_node()):
        read = gm.graph.call_function(torch.add, (first, first))
        both = gm.graph.call_function(torch.add, (read, first))
    gm.graph.output_node().replace_input_with(first, both)
    assert merged(gm, None) == [64, 128 + 32]


def test_the_reduction_of_an_activation_before_that_of_the_embedding_stays() -> None:
    """All that follows the one leads to the other: merged, each would wait for the other."""
    gm = reductions([[64], [32], [16]])
    output = gm.graph.output_node()
    second = output.all_input_nodes[1].all_input_nodes[0]
    (first, *_) = output.all_input_nodes
    with gm.graph.inserting_before(second):
        reads = gm.graph.call_function(torch.ops.aten.slice.Tensor, (first, 0, 0, 32))
        reads.meta["val"] = second.meta["val"]
    second.replace_input_with(second.all_input_nodes[0], reads)
    output.args = (tuple(output.all_input_nodes[1:]),)
    assert merged(gm, None) == [64, 64 + 16]  # the second padded to 64
