"""From the gradients of a graph to `.grad`: `unalias` gives each its own memory, `accumulate`
stores them.

AccumulateGrad detaches what it stores, which for a DTensor is ten microseconds of Python a
parameter. What it would store as it is, is stored here; everything else is left to it: a gradient
that is there already, hooks, `autograd.grad`, `backward(inputs=...)`, `create_graph=True`.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, message


class GradientLayout(NamedTuple):
    """The memory of a graph's gradients as `unalias` found it; it is the same in every step.

    nbytes: of each gradient. wasteful: those to copy for what they would keep alive. sparse:
    whether any was, before it was made dense.
    """

    nbytes: list[int]
    wasteful: list[int]
    sparse: bool


STORE_DIRECTLY = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Whether `accumulate` stores gradients itself. False leaves all of them to autograd, with equal
results and some ten microseconds more a parameter and step.

It asks Python's reference count whether anybody else holds the AccumulateGrad node of a parameter:
who does may have hooked it (DDP, and FSDP of torch do), and a gradient that is stored past the node
would not call the hook. Nothing else tells of such hooks. Without the global interpreter lock the
count is no longer exact.
"""

GradientLayouts = dict[tuple[bool, ...], GradientLayout]
"""The layouts of a graph, by which of its gradients are present."""


def unalias(
    grads: Sequence[torch.Tensor | None], known: GradientLayouts | None = None
) -> list[torch.Tensor | None]:
    """`grads`, contiguous, no two of the same memory.

    Views of one storage stay views where they are most of it together: a bucket of reduced
    gradients is handed out in pieces, without a copy. What is a small part of its storage is
    copied, since it would keep the rest alive; and so is what another one overlaps, since `.grad`
    is written to: two biases that are added have one gradient, which a graph computes once.

    known: of earlier calls for the same graph, which spares asking each gradient for its storage;
    that no two overlap is looked at each time.
    """
    present = tuple([grad is not None for grad in grads])
    layout = None if known is None else known.get(present)
    sparse = layout.sparse if layout else any(g is not None and g.is_sparse for g in grads)
    if sparse:  # of an embedding: shards, and the ranks' sums of them, are dense
        grads = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    if layout is None:
        nbytes = [0 if grad is None else grad.nbytes for grad in grads]
    else:
        nbytes = layout.nbytes
    try:
        held = [(grad.data_ptr(), i) for i, grad in enumerate(grads) if grad is not None]
    except RuntimeError as error:  # what a batch of vmap's has is not memory of its own
        raise AutoshardError(
            message(
                "gradients of stored parameters were asked for in one batch, by is_grads_batched "
                "or vectorize",
                remedy="Take them one by one, in a loop over grad_outputs.",
            )
        ) from error
    held.sort()
    found = list(grads)
    end, overlap = 0, set()
    for start, i in held:
        if start < end:
            overlap.add(i)
        else:
            end = start + nbytes[i]
    if layout is None:
        layout = GradientLayout(nbytes, _wasteful(grads, overlap), sparse)
        if known is not None:
            known[present] = layout
    for i in overlap.union(layout.wasteful):
        grad = grads[i]
        assert grad is not None
        found[i] = grad.clone(memory_format=torch.contiguous_format)
    return found


def _wasteful(grads: Sequence[torch.Tensor | None], overlap: set[int]) -> list[int]:
    """Gradients that together use little of their storage, or are not contiguous."""
    alone = {i: grad for i, grad in enumerate(grads) if grad is not None and i not in overlap}
    storages = {i: grad.untyped_storage() for i, grad in alone.items()}
    used: dict[int, int] = {}  # of each storage, by its address
    for i, grad in alone.items():
        base = storages[i].data_ptr()
        used[base] = used.get(base, 0) + grad.nbytes
    return [
        i
        for i, grad in alone.items()
        if not grad.is_contiguous()
        or not keeps_storage(used[storages[i].data_ptr()], storages[i].nbytes())
    ]


def keeps_storage(used: int, nbytes: int) -> bool:
    """Whether gradients of `used` bytes together stay views of a storage of `nbytes`: where they
    are three quarters of it or more. Less would keep too much else alive, and is copied."""
    return 4 * used >= 3 * nbytes


def accumulate(
    node: Any, parameters: Sequence[DTensor], grads: Sequence[torch.Tensor | None]
) -> tuple[DTensor | None, ...]:
    """The gradient that the backward of `node` returns; None where the parameter has got it.

    node: the autograd node whose inputs are `parameters`, in whose backward this is called.
    grads: the local part of each parameter's gradient; owned by nobody else.
    """
    left = [
        None if grad is None else compat.dtensor_like(parameter, grad)
        for parameter, grad in zip(parameters, grads)
    ]
    recorded = torch.is_grad_enabled() or compat.compiling()  # a graph of the backward
    if recorded or not STORE_DIRECTLY:
        return tuple(left)
    leaves, unshared = _targets(node), _references_of_unshared()
    stores = compat.AccumulateGrad
    with compat.plain_attributes():
        for i, parameter in enumerate(parameters):
            if (
                left[i] is not None
                and type(leaves[i]) is stores
                and parameter.grad is None
                and sys.getrefcount(leaves[i]) == unshared
                and compat.only_stores(leaves[i], parameter)
            ):
                parameter.grad = left[i]
                left[i] = None
    return tuple(left)


def _targets(node: Any) -> list[Any]:
    return [target for target, _ in node.next_functions]


@functools.cache
def _references_of_unshared() -> int:
    """Number of references `sys.getrefcount` counts of an AccumulateGrad node that nobody else
    holds, in a list such as that of `accumulate`; it differs between versions of Python."""
    with torch.enable_grad(), torch.inference_mode(False):
        x = torch.ones((), requires_grad=True, device="cpu")
        y = x.view_as(x)  # holds the node: nothing is run, which would start autograd's threads
    leaves = _targets(y.grad_fn)
    return sys.getrefcount(leaves[0])
