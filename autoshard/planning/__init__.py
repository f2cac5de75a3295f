"""Planning: operators' rules, costs, the exact plan of a graph, prices of a mesh."""

from __future__ import annotations

from autoshard.planning.asked import Request, fingerprint, with_graph
from autoshard.planning.context_parallel import attention_form, contiguous_share
from autoshard.planning.decisions import Decisions, Recomputation, serial_name, value_text
from autoshard.planning.mixtures import (
    ROWS,
    WAYS,
    WEIGHTS,
    gathered_stacks,
    is_mixture,
    not_of_zero,
    way_of,
)
from autoshard.planning.one_axis import PlanEstimate, at_dearer_bytes, plan_graph, priced
from autoshard.planning.operators import (
    LOOKUPS,
    LOSSES,
    PRODUCTS,
    RESHAPES,
    is_handed_on,
    is_view,
    packet,
    target_name,
    unflattened,
)
from autoshard.planning.outer import Outer, on_rank
from autoshard.planning.part_choices import JoinedChoices, PartTrade, part_trade
from autoshard.planning.plan import GraphPlan, PipelinePlan, Plan, strategy_text
from autoshard.planning.prices import Prices
from autoshard.planning.sizes import Size, is_one, same, same_shape
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.two_axes import TwoAxes, both_at_dearer_bytes, plan_both
from autoshard.planning.values import (
    global_bytes,
    is_trained,
    output_state,
    producer,
    shardable,
    tensor_bytes,
)
