"""The graph of a stage that adds up its gradients: one more input for each, after its own.

If the backward of a stage returned its gradients, all of one micro-batch would be there beside
their sums: a stage would need its parameters' size once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.planning import value
from autoshard.runtime.graph_meta import DIFF


def graded_parameters(gm: fx.GraphModule, parameters: int) -> list[int]:
    """Which of the first placeholders, as many as there are parameters, get a gradient."""
    reached = {n for n in gm.graph.output_node().all_input_nodes if n.meta.get(DIFF)}
    for node in reversed(gm.graph.nodes):
        if node in reached:
            reached.update(n for n in node.all_input_nodes if n.meta.get(DIFF) is not False)
    own = gm.graph.find_nodes(op="placeholder")[:parameters]
    return [i for i, node in enumerate(own) if node in reached and value(node).requires_grad]


def adding_up(
    gm: fx.GraphModule, graded: Sequence[int], dtypes: Sequence[torch.dtype]
) -> fx.GraphModule:
    """The graph where each parameter of `graded`, by its number, has a sum of its dtype."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    old = gm.graph.find_nodes(op="placeholder")
    for node in old:
        made[node] = graph.node_copy(node)
    sums = []
    for i in graded:
        sums.append(graph.placeholder(f"gradient_sum_{i}"))
        val = value(old[i]).detach()
        sums[-1].meta["val"] = torch.empty_like(val, dtype=dtypes[i])  # no alias of it
        sums[-1].meta[DIFF] = False
    for i, total in zip(graded, sums):
        own = graph.call_function(summed, (made[old[i]], total))
        own.meta = dict(old[i].meta)
        made[old[i]] = own
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(fx.node.map_arg(gm.graph.output_node().args[0], made.__getitem__))
    return fx.GraphModule(gm, graph)


def summed(parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The parameter; in backward its gradient is added to `total`, of its shape, and it gets none.

    Other micro-batches write to `total` between this forward and its backward: give an alias of it
    (`total.data`), which has a version counter of its own.
    """
    found: torch.Tensor = _Summed.apply(parameter, total)
    return found


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.total.add_(grad.to_dense() if grad.is_sparse else grad)
        return None, None
