"""A compiled program as one thread at a time runs it, forward and backward, with errors that name
the rank that is missing from a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.agreement import CollectiveRegion
from autoshard.runtime.collectives import Axis


def watched(compiled: Callable[..., Any], axes: Sequence[Axis]) -> Callable[..., Any]:
    """`compiled`, a local graph that `compile_local` has compiled, in regions of collectives.

    The backward of AOTAutograd's graphs is one too, from the first call that records it on. With
    inner="eager" there is none: autograd runs the operators one by one.
    """
    forward = CollectiveRegion("the forward of a compiled graph", axes)
    backward = CollectiveRegion("the backward of a compiled graph", axes)
    armed = False

    def run(*values: Any) -> Any:
        nonlocal armed
        with forward:
            outputs = compiled(*values)
        if not armed and torch.is_grad_enabled():
            armed = compat.around_backward(outputs, backward)
        return outputs

    return run
