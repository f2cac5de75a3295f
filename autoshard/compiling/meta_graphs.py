"""A graph traced on the meta device, as if it had been traced on the CPU.

On meta, attention has no fused kernel: AOTAutograd would differentiate its slow form, which keeps
every attention matrix, and predict the memory of a program that nobody runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.runtime.compat import FakeTensor

aten = torch.ops.aten


def off_meta(gm: fx.GraphModule, fakes: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """`gm` and its inputs, with CPU in the place of meta; themselves where nothing is on meta.

    fakes: one an input, of one fake mode; the new ones are of the same.
    """
    if not any(isinstance(fake, FakeTensor) and fake.is_meta for fake in fakes):
        return gm, list(fakes)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        node.args = fx.node.map_aggregate(node.args, _elsewhere)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _elsewhere)
        if node.target is aten.histc.default:  # on a CPU it counts floating numbers only
            with graph.inserting_before(node):
                source = graph.call_function(
                    aten._to_copy.default, node.args[:1], {"dtype": torch.float32}
                )
            node.args = (source, *node.args[1:])
    return fx.GraphModule(gm, graph), [_moved(fake) for fake in fakes]


def _elsewhere(argument: Any) -> Any:
    is_meta = isinstance(argument, torch.device) and argument.type == "meta"
    return torch.device("cpu") if is_meta else argument


def _moved(fake: Any) -> Any:
    if not isinstance(fake, FakeTensor) or not fake.is_meta:
        return fake
    with fake.fake_mode:
        moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
    return moved.requires_grad_(fake.requires_grad)
