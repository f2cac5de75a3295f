"""What to shard: operators' rules, costs, the exact plan of a graph, prices of a mesh."""

from __future__ import annotations

from autoshard.planning.operators import (
    LOOKUPS,
    LOSSES,
    PRODUCTS,
    RESHAPES,
    is_view,
    packet,
)
from autoshard.planning.plan import Plan, strategy_text
from autoshard.planning.planner import Decisions, Request, fingerprint, plan_graph, with_graph
from autoshard.planning.prices import TRAINED_BYTES, Prices
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

__all__ = [
    "Decisions",
    "LOOKUPS",
    "LOSSES",
    "PRODUCTS",
    "Plan",
    "Prices",
    "RESHAPES",
    "Request",
    "Strategy",
    "TRAINED_BYTES",
    "fingerprint",
    "fusible",
    "global_bytes",
    "is_lookup",
    "is_view",
    "operands",
    "output_state",
    "packet",
    "plan_graph",
    "producer",
    "same_shape",
    "strategy_text",
    "tensor_bytes",
    "value",
    "with_graph",
]
