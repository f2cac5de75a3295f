"""Programs and graphs with collectives to merge, and questions about their order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.passes.lib.bucketing import ALL_REDUCE, WAIT, waits_of
from autoshard.program import Program
from autoshard.runtime.graph_meta import BUCKET
from models import CASES
from traced import builder

_built: dict[str, Program] = {}


def program(mesh: dict[str, int], **config: Any) -> Program:
    """The tiny Llama's program; traced once, built once for each mesh and configuration."""
    key = repr((mesh, config))
    if key not in _built:
        _built[key] = _build()(mesh, **config)
    return _built[key]


@functools.cache
def _build() -> Callable[..., Program]:
    case = CASES["llama"]
    return builder(case.make_model(), (), case.make_batch(0))


def reductions(shapes: list[list[int]], kinds: list[str] | None = None) -> fx.GraphModule:
    """A graph of gradients that are all-reduced one after another and returned."""
    graph = fx.Graph()
    with FakeTensorMode():
        fakes = [torch.empty(shape) for shape in shapes]
    outputs = []
    inputs = [graph.placeholder(f"g{i}") for i in range(len(shapes))]
    for node, fake, kind in zip(inputs, fakes, kinds or [""] * len(shapes), strict=True):
        node.meta["val"] = fake
        started = graph.call_function(ALL_REDUCE, (node, "sum", "offline:dp"))
        started.meta = {"val": fake, "custom": {BUCKET: kind} if kind else {}}
        waited = graph.call_function(WAIT, (started,))
        waited.meta = {"val": fake}
        outputs.append(waited)
    graph.output(tuple(outputs))
    return fx.GraphModule({}, graph)


def between(graph: fx.Graph, start: fx.Node, end: fx.Node) -> list[fx.Node]:
    nodes = list(graph.nodes)
    return nodes[nodes.index(start) + 1 : nodes.index(end)]


def compute(nodes: list[fx.Node]) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in nodes)


def wait_of(node: fx.Node) -> fx.Node:
    return min(waits_of(node))
