"""What to shard: operators' rules, costs, the exact plan of a graph, prices of a mesh."""

from __future__ import annotations

from autoshard.planning.plan import Plan, strategy_text
from autoshard.planning.planner import Decisions, Request, fingerprint, merged, plan_graph
from autoshard.planning.problem import TRAINED_BYTES, Prices
from autoshard.planning.sizes import same_shape
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import (
    fusible,
    global_bytes,
    is_lookup,
    output_state,
    producer,
    tensor_bytes,
)
from autoshard.planning.whole import whole_graph

__all__ = [
    "Decisions",
    "Plan",
    "Prices",
    "Request",
    "Strategy",
    "TRAINED_BYTES",
    "fingerprint",
    "fusible",
    "global_bytes",
    "is_lookup",
    "merged",
    "operands",
    "output_state",
    "plan_graph",
    "producer",
    "same_shape",
    "strategy_text",
    "tensor_bytes",
    "value",
    "whole_graph",
]
