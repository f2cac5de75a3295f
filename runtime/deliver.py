"""From the gradients of a graph to `.grad`: `apart` gives each its own memory, `deliver` stores.

AccumulateGrad detaches what it stores, which for a DTensor is ten microseconds of Python a
parameter. What it would store as it is, is stored here; everything else is left to it: a gradient
that is there already, hooks, `autograd.grad`, `backward(inputs=...)`, `create_graph=True`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat


def apart(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """`grads`, contiguous, no two of the same memory.

    Views of one storage stay views where they are most of it together: a bucket of reduced
    gradients is handed out in pieces, without a copy. What is a small part of its storage is
    copied, since it would keep the rest alive; and so is what another one overlaps, since `.grad`
    is written to: two biases that are added have one gradient, which a graph computes once.
    """
    found = list(grads)
    held = [(grad.data_ptr(), i, grad) for i, grad in enumerate(grads) if grad is not None]
    held.sort(key=_address)
    used: dict[int, int] = {}  # of each storage, by its address
    end, alone = 0, []
    for start, i, grad in held:
        if start < end:
            found[i] = _copy(grad)
            continue
        end = start + grad.nbytes
        base = start - int(grad.storage_offset()) * grad.element_size()
        used[base] = used.get(base, 0) + grad.nbytes
        alone.append((i, base, grad))
    sizes: dict[int, int] = {}
    for i, base, grad in alone:
        if base not in sizes:
            sizes[base] = grad.untyped_storage().nbytes()
        if 4 * used[base] < 3 * sizes[base] or not grad.is_contiguous():
            found[i] = _copy(grad)
    return found


_address = operator.itemgetter(0, 1)


def _copy(grad: torch.Tensor) -> torch.Tensor:
    return grad.clone(memory_format=torch.contiguous_format)


def deliver(
    node: Any, parameters: Sequence[DTensor], grads: Sequence[DTensor | None]
) -> tuple[DTensor | None, ...]:
    """What the backward of `node` returns: None where the parameter has got its gradient.

    node: the autograd node whose inputs are `parameters`, in whose backward this is called.
    grads: one a parameter, of its placements; owned by nobody else.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():  # a graph of the backward
        return tuple(grads)
    left = list(grads)
    leaves = _targets(node)
    for i, (parameter, grad) in enumerate(zip(parameters, grads)):
        if (
            grad is not None
            and compat.stores_gradient(leaves[i])
            and parameter.grad is None
            and sys.getrefcount(leaves[i]) == _ALONE
            and not parameter._backward_hooks
            and not parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            and compat.will_execute(leaves[i])
        ):
            parameter.grad = grad
            left[i] = None
    return tuple(left)


def _targets(node: Any) -> list[Any]:
    return [target for target, _ in node.next_functions]


def _count_alone() -> int:
    with torch.enable_grad(), torch.inference_mode(False):
        x = torch.ones((), requires_grad=True, device="cpu")
        y = x.view_as(x)  # holds the node: nothing is run, which would start autograd's threads
    leaves = _targets(y.grad_fn)
    return sys.getrefcount(leaves[0])


# References to an AccumulateGrad node that nobody else holds, which differ with Python's version.
# Who hooks such a node keeps it: autograd drops it, and its hooks, after each backward.
_ALONE = _count_alone()
