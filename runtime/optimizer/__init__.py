"""An optimizer's step: on this rank's parts, or in the host's memory."""

from __future__ import annotations

from autoshard.runtime.optimizer.offloaded import offload_optimizer
from autoshard.runtime.optimizer.stepping import optimizer
