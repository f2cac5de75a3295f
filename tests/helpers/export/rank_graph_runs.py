"""Run rank graphs in torch: every rank of a plan in one process, collectives in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.rank_graph.plan import InferencePlan
from autoshard.export.rank_graph.weights import read_weights
from autoshard.export.serial_graph import WeightSource
from autoshard.runtime.collectives import lockstep
from autoshard.runtime.collectives.axis import Axis

_c10d = torch.ops._c10d_functional


class _Ranked(fx.Interpreter):
    def __init__(self, graph: RankGraph, axis: Axis) -> None:
        super().__init__(graph.module)
        self.rank_graph, self.axis = graph, axis

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        assert args[-1] == self.rank_graph.axis.group, args
        parts = lockstep.exchange(self.axis, str(target), args[0])
        if target is _c10d.all_reduce.default:
            assert args[1] == "sum", args
            return torch.stack(parts).sum(0)
        if target is _c10d.all_gather_into_tensor.default:
            return torch.cat(parts)
        if target is _c10d.reduce_scatter_tensor.default:
            return torch.stack(parts).sum(0).chunk(self.axis.size)[self.axis.rank]
        raise NotImplementedError(target)


def run_plan(
    plan: InferencePlan, model: nn.Module, feeds: Sequence[Sequence[torch.Tensor]]
) -> list[list[Any]]:
    """For each rank, the outputs of each of `feeds`, called one after the other.

    A feed holds the inputs; caches are carried from one call to the next, from zeros.
    """
    graphs = [plan.rank_graph(rank) for rank in range(plan.tp)]
    source = WeightSource(model)
    weights = [read_weights(source, graph, rank) for rank, graph in enumerate(graphs)]

    def work(axis: Axis) -> list[Any]:
        graph, own = graphs[axis.rank], weights[axis.rank]
        caches: list[torch.Tensor] | None = None
        results = []
        for feed in feeds:
            if caches is None:
                rows = feed[0].shape[0]
                ports = [p for p in graph.inputs if p.role.endswith("cache")]
                caches = [torch.zeros(rows, *p.shape[1:], dtype=p.dtype) for p in ports]
            values = [*feed, *caches]
            values += [
                own[name] if name in own else graph.constants[name]
                for name in [
                    str(n.target) for n in graph.module.graph.find_nodes(op="placeholder")
                ][len(values) :]
            ]
            out = _Ranked(graph, axis).run(*values)
            n = len(out) - len(caches)
            caches = list(out[n:])
            results.append(out[:n])
        return results

    with torch.no_grad():
        return lockstep.run_ranks(plan.tp, work)
