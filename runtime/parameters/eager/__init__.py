"""Stored tensors in eager code: the class, and what each operator does with them."""

from __future__ import annotations

from autoshard.runtime.parameters.eager.gathering import gathered_axes, unsharded
from autoshard.runtime.parameters.eager.graph_boundary import (
    Arrivals,
    EagerValues,
    check_copies,
    give_back,
    in_one_memory,
    is_eager_value,
    keep_copies,
)
from autoshard.runtime.parameters.eager.stored_tensor import StoredTensor, as_parameter, as_stored
from autoshard.runtime.parameters.eager.whole_views import WholeView
