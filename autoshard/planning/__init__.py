"""Planning: operators' rules, costs, the exact plan of a graph, prices of a mesh."""

from autoshard.planning.context_parallel import attention_form, contiguous_share
from autoshard.planning.cost import tensor_bytes
from autoshard.planning.decisions import (
    Decisions,
    Outer,
    Recomputation,
    on_rank,
    planned_value,
    serial_name,
    value_text,
)
from autoshard.planning.mixtures import (
    ROWS,
    WAYS,
    WEIGHTS,
    gathered_stacks,
    is_mixture,
    not_of_zero,
    way_of,
)
from autoshard.planning.operators import (
    LOOKUPS,
    LOSSES,
    PRODUCTS,
    RESHAPES,
    arguments,
    inputs_of,
    is_handed_on,
    is_view,
    packet,
    reached,
    target_name,
    unflattened,
    view_chain,
    views_among,
)
from autoshard.planning.plan import PLAN_FILE, GraphPlan, PipelinePlan, Plan, strategy_text
from autoshard.planning.prices import Prices
from autoshard.planning.search import (
    JoinedChoices,
    PlanEstimate,
    Request,
    TwoAxes,
    at_dearer_bytes,
    both_at_dearer_bytes,
    cheap_places,
    crossing,
    estimates,
    fingerprint,
    part_trade,
    places,
    plan_both,
    plan_graph,
    with_graph,
)
from autoshard.planning.sizes import Size, is_one, same, same_shape
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import (
    global_bytes,
    is_loss,
    is_trained,
    output_state,
    producer,
    shardable,
    state_of,
)
