"""Mesh axes, states of a value on an axis, and the change from one to another."""

from autoshard.runtime.collectives.axis import (
    CHOICES,
    DATA_AXES,
    ONCE,
    TWICE,
    WHOLE,
    Axis,
    chunk_bounds,
    chunk_size,
    data_axes,
    data_states,
    deferred_axes,
    gathering_axes,
    head_tail,
    in_order,
    outer_axis,
    own_chunks,
    whole_shape,
)
from autoshard.runtime.collectives.fused import (
    FUSED_PRODUCTS,
    GATHER_MATMUL,
    MATMUL_SCATTER,
    reduce_add_norm,
)
from autoshard.runtime.collectives.lockstep import PREFIX, exchange, run_mesh, run_ranks
from autoshard.runtime.collectives.redistribution import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    convert,
    redistribute,
    reduce_wide,
)
from autoshard.runtime.collectives.row_exchange import (
    EXCHANGES,
    counts_on_host,
    dispatch_rows,
    exchange_rows,
    leaving,
)
from autoshard.runtime.collectives.states import (
    H,
    I,
    P,
    R,
    S,
    State,
    Z,
    change_steps,
    conversions,
    forward_value,
    gradient_state,
    gradient_value,
    home_rank,
    in_words,
    is_head_tail,
    is_state,
    placement_words,
    shard_dim,
    step,
    with_dim,
)
