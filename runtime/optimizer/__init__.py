"""An optimizer's step: on this rank's parts, or in the host's memory."""

from autoshard.runtime.optimizer.derived import unhooked_step
from autoshard.runtime.optimizer.exchange import Sharers
from autoshard.runtime.optimizer.matrix_owners import (
    OwnedMatrix,
    Rates,
    SharedMatrix,
    Work,
    assign_owners,
    work_of,
)
from autoshard.runtime.optimizer.offloaded import offload_optimizer
from autoshard.runtime.optimizer.stepping import optimizer, ways_of
