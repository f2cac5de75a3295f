"""The graph of one micro-batch, planned on tp: of one rank, before it is cut into stages.

A micro-batch is a shard of the batch, laid out first, as cp is where it stands beside tp; its graph
is planned on tp like any other. The graph of a tp rank is then cut: what a stage sends is what its
rank holds of a value, to the rank of its own number in the next stage. Only dims are split that tp
divides, so that all tp ranks have the same graph, and the same cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autoshard.building.pipeline.microbatch import MicrobatchGraph
from autoshard.config import Config
from autoshard.passes import Localize, rank_program
from autoshard.planning import Request, plan_graph, strategy_text
from autoshard.planning.cost import Hardware
from autoshard.runtime.collectives import Axis, State
from autoshard.runtime.graph_meta import OUTPUT_STATES


def split_operators(
    microbatch: MicrobatchGraph,
    names: Mapping[fx.Node, str],
    stored: Mapping[fx.Node, State],
    axis: Axis,
    machine: Hardware,
    config: Config,
) -> MicrobatchGraph:
    """The graph of this rank of `axis`, of one micro-batch.

    names, stored: of the parameters by their placeholder in the serial graph: names, and the states
    on the axis in which they are stored already.
    """
    whole = microbatch.local
    placeholders = whole.graph.find_nodes(op="placeholder")
    own = dict(zip(placeholders, microbatch.parameters))  # shared values are behind them
    request = Request(
        axis=axis.name,
        parameters={node: names[parameter] for node, parameter in own.items()},
        stored={node: stored[p] for node, p in own.items() if p in stored},
        sequence_parallel=config.sequence_parallel,
        even=True,
    )
    decisions = plan_graph(whole, axis.size, machine, request)
    local, _ = rank_program(whole, [Localize(decisions, config.recompute_collectives)], axis)
    chosen = decisions.strategies.items()
    return replace(
        microbatch,
        local=local,
        split={parameter: decisions.stored[node] for node, parameter in own.items()},
        shards=list(local.meta[OUTPUT_STATES]),
        plan=[f"{node.name} on {axis.name}: {strategy_text(one)}" for node, one in chosen],
    )
