"""Ranks compare what they do, and say why they failed."""

from autoshard.runtime.agreement.backwards import (
    REPLICAS,
    count_stored,
    reducing,
    will_reduce,
)
from autoshard.runtime.agreement.batches import Input, compare_batch, described, send_batch
from autoshard.runtime.agreement.compiled_once import AHEAD, compiled_across_hosts, compiles
from autoshard.runtime.agreement.consensus import (
    agree,
    attempt,
    combined,
    everyone,
    from_first,
    gather,
    world_axis,
)
from autoshard.runtime.agreement.history import Call
from autoshard.runtime.agreement.regions import (
    CollectiveRegion,
    announced,
    line_of,
    users_line,
)
from autoshard.runtime.agreement.store_exchange import SAME
from autoshard.runtime.agreement.threads import Background
from autoshard.runtime.agreement.worlds import (
    compare_every,
    limit_group,
    restarts,
    wait_at_most,
)
