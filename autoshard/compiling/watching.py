"""A compiled program as one thread at a time runs it, forward and backward, with errors that name
the rank that is missing from a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.agreement import CollectiveRegion
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import message


def watched(compiled: Callable[..., Any], axes: Sequence[Axis]) -> Callable[..., Any]:
    """`compiled`, a local graph that `compile_local` has compiled, in regions of collectives.

    The backward of AOTAutograd's graphs is one too, from the first call that records it on. With
    inner="eager" there is none: autograd runs the operators one by one.
    """
    forward = CollectiveRegion("the forward of a compiled graph", axes)
    backward = CollectiveRegion("the backward of a compiled graph", axes)
    refusal = message(
        "a second derivative through a compiled graph, which AOTAutograd does not compile "
        "(create_graph=True, a penalty on a gradient, a product with the Hessian)",
        remedy="Compute the loss whose gradient is differentiated with the model that was given "
        "to torch.compile, in eager code, or compile with options={'inner': 'eager'}.",
    )
    armed = False

    def run(*values: Any) -> Any:
        nonlocal armed
        with forward:
            outputs = compiled(*values)
        if not armed and torch.is_grad_enabled():
            armed = compat.around_backward(outputs, backward, refusal)
        return outputs

    return run
