"""Reduce-scatters of the host's memory as exchanges, in graphs whose sizes are symbolic, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from autoshard.passes.base import Context
from autoshard.passes.lib.bucketing import REDUCE_SCATTER, WAIT
from autoshard.passes.reduce_scatter_by_all_to_all import ALL_TO_ALL, ReduceScatterByAllToAll
from autoshard.runtime import compat


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_are_numbers_or_nodes(dynamic: bool) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not dynamic)
    source = torch.ones(8, 6)
    if dynamic:
        compat.mark_dynamic(source, 0)
        compat.mark_dynamic(source, 1)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(source)
    scattered = graph.call_function(REDUCE_SCATTER, (x, "sum", 2, "0"))
    done = graph.call_function(WAIT, (scattered,))
    rows, columns = x.meta["val"].shape
    for node in (scattered, done):
        node.meta["val"] = x.meta["val"].new_empty((rows // 2, columns))
    graph.output((done,))
    gm = fx.GraphModule({}, graph)
    ctx: Any = Context.__new__(Context)
    assert ReduceScatterByAllToAll().run(gm, ctx).hits == 1
    gm.graph.lint()
    exchanged = next(n for n in gm.graph.nodes if n.target is ALL_TO_ALL)
    kind = fx.Node if dynamic else int
    assert all(isinstance(size, kind) for size in exchanged.args[1])
    for node in gm.graph.nodes:
        values = tree_leaves((node.args, node.kwargs))
        assert not any(isinstance(value, torch.SymInt) for value in values)
    total = next(iter(reversed(gm.graph.nodes))).args[0][0]
    made, columns = total.meta["val"].shape
    assert (made, columns) == (4, 6)  # with symbols: by their hints
