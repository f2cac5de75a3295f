"""Parameters stored as shards: access, gradients, accumulation, optimizers."""

from __future__ import annotations

from autoshard.runtime.parameters.access import lower, lowered
from autoshard.runtime.parameters.accumulation import (
    attend,
    discard_pending,
    is_used,
    no_sync,
    pending_of,
    set_use,
    use_of,
)
from autoshard.runtime.parameters.data_unsharding import (
    ACCUMULATE,
    FLUSH,
    MICROBATCH,
    SINGLE,
    Use,
    deferred_at,
    unshard,
)
from autoshard.runtime.parameters.gradients import Layouts, keeps_storage
from autoshard.runtime.parameters.layout import (
    as_dtensors,
    extents,
    is_planned,
    local_bounds,
    local_part,
    owned,
    set_planned,
    stored_states,
)
from autoshard.runtime.parameters.owners import models_of
from autoshard.runtime.parameters.shard import related_parameters, shard_parameters, unstorable
from autoshard.runtime.parameters.unsharding import materialize, unwrap

__all__ = [
    "is_planned",
    "set_planned",
    "ACCUMULATE",
    "FLUSH",
    "Layouts",
    "MICROBATCH",
    "SINGLE",
    "Use",
    "as_dtensors",
    "attend",
    "deferred_at",
    "discard_pending",
    "extents",
    "is_used",
    "keeps_storage",
    "local_bounds",
    "local_part",
    "lower",
    "lowered",
    "materialize",
    "models_of",
    "no_sync",
    "owned",
    "pending_of",
    "related_parameters",
    "set_use",
    "shard_parameters",
    "stored_states",
    "unshard",
    "unstorable",
    "unwrap",
    "use_of",
]
