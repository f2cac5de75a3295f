"""Parameters stored as shards: access, gradients, accumulation, optimizers."""

from __future__ import annotations

from autoshard.runtime.parameters.access import cast_parameters, casting
from autoshard.runtime.parameters.accumulation import (
    discard_pending,
    no_sync,
    on_backward_done,
)
from autoshard.runtime.parameters.data_unsharding import (
    ACCUMULATE,
    FLUSH,
    MICROBATCH,
    SINGLE,
    ParameterPolicy,
    deferred_at,
    unshard,
)
from autoshard.runtime.parameters.gradients import Layouts, keeps_storage
from autoshard.runtime.parameters.layout import (
    as_dtensors,
    extents,
    local_bounds,
    local_part,
    owned,
    stored_states,
)
from autoshard.runtime.parameters.owners import models_of
from autoshard.runtime.parameters.record import (
    has_policy,
    is_planned,
    pending_of,
    policy_of,
    set_planned,
    set_policy,
)
from autoshard.runtime.parameters.shard import related_parameters, shard_parameters, unstorable
from autoshard.runtime.parameters.unsharding import unshard_parameter, unwrap

__all__ = [
    "is_planned",
    "set_planned",
    "ACCUMULATE",
    "FLUSH",
    "Layouts",
    "MICROBATCH",
    "SINGLE",
    "ParameterPolicy",
    "as_dtensors",
    "on_backward_done",
    "deferred_at",
    "discard_pending",
    "extents",
    "has_policy",
    "keeps_storage",
    "local_bounds",
    "local_part",
    "cast_parameters",
    "casting",
    "unshard_parameter",
    "models_of",
    "no_sync",
    "owned",
    "pending_of",
    "related_parameters",
    "set_policy",
    "shard_parameters",
    "stored_states",
    "unshard",
    "unstorable",
    "unwrap",
    "policy_of",
]
