"""Parameters stored as shards: access, gradients, accumulation, optimizers."""

from __future__ import annotations

from autoshard.runtime.parameters.access import cast_parameters, casting
from autoshard.runtime.parameters.buffers import note_attributes, settle_buffers
from autoshard.runtime.parameters.data_unsharding import (
    ACCUMULATE,
    FLUSH,
    MICROBATCH,
    SINGLE,
    ParameterPolicy,
    deferred_at,
    unshard,
)
from autoshard.runtime.parameters.eager import (
    Arrivals,
    EagerValues,
    check_copies,
    give_back,
    in_one_memory,
    is_eager_value,
    keep_copies,
)
from autoshard.runtime.parameters.gradients import (
    GradientLayouts,
    discard_pending,
    keeps_storage,
    no_sync,
    on_backward_done,
)
from autoshard.runtime.parameters.layout import (
    as_dtensors,
    extents,
    home_of,
    is_whole,
    like,
    local_bounds,
    local_part,
    owned,
    stored_states,
    wrap_local,
)
from autoshard.runtime.parameters.optimizers import expect_stored
from autoshard.runtime.parameters.owners import Holders, models_of, names_of, related_parameters
from autoshard.runtime.parameters.record import (
    choice_of,
    has_policy,
    is_planned,
    pending_of,
    policy_of,
    set_choice,
    set_planned,
    set_policy,
)
from autoshard.runtime.parameters.shard import (
    replace_stored,
    shard_parameters,
    states_of,
    unstorable,
)
from autoshard.runtime.parameters.stage_unsharding import StageParameters, StageUnsharding
from autoshard.runtime.parameters.unsharding import unshard_parameter, unwrap
from autoshard.runtime.parameters.wrappers import full_state_dict, refuse_ddp
