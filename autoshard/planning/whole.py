"""The plan of a graph that is not split: every value whole, on an axis of one rank.

Data parallelism alone needs no search, only the same Decisions that the rewrite reads.
"""

from __future__ import annotations

from torch import fx

from autoshard.planning.cost import Hardware
from autoshard.planning.planner import Decisions, Request
from autoshard.planning.problem import Builder, Prices
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import producer
from autoshard.runtime.collectives import R


def whole_graph(gm: fx.GraphModule, hardware: Hardware, request: Request) -> Decisions:
    """Decisions that leave every node of `gm` as it is."""
    results = list(next(iter(reversed(gm.graph.nodes))).args[0])  # type: ignore[arg-type]
    builder = Builder(
        gm,
        1,
        hardware,
        stored={},
        arriving={},
        output_domains=[[R] for _ in results],
        outputs_read=True,
        sequence_parallel=request.sequence_parallel,
        prices=Prices(),
    )
    strategies = {}
    for node in gm.graph.nodes:
        if node.op == "output" or producer(node)[0] is not node:
            continue
        val = value(node)
        output = (R,) * len(val) if isinstance(val, (tuple, list)) else R
        strategies[node] = Strategy((R,) * len(operands(node)), output)
        builder.problem.domains[node] = [strategies[node]]
    return Decisions(
        strategies,
        copies={},
        stored={node: R for node in request.parameters},
        outputs=[R] * len(results),
        declined={},
        seconds=0.0,
        width=0,
        work=0,
        builder=builder,
    )
