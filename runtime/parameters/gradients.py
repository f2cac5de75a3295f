"""From the gradients of a graph to `.grad`, and which of them wait, where, and until when.

`unalias` gives each its own memory, `accumulate` stores them. AccumulateGrad detaches what it
stores, which for a DTensor is ten microseconds of Python a parameter. What it would store as it is,
is stored here; everything else is left to it: a gradient that is there already, hooks,
`autograd.grad`, `backward(inputs=...)`, `create_graph=True`.

Gradient accumulation: inside `no_sync` every module that owns stored parameters says so in one
attribute, which the property of its parameters reads and Dynamo guards: a model has at most three
variants of each of its graphs (`MICROBATCH`), and none is compiled again. An accumulating backward
adds to a pending sum a parameter, outside of `.grad`; the first backward whose forward ran outside
of the context reduces the sum with its own gradient.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, in_one_batch
from autoshard.runtime.parameters.data_unsharding import ACCUMULATE, FLUSH, SINGLE
from autoshard.runtime.parameters.layout import home_of
from autoshard.runtime.parameters.record import Pending, pending_of, policy_of


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
        raise in_one_batch("stored parameters") from error
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
    node: Any, parameters: Sequence[DTensor], grads: Sequence[DTensor | None]
) -> tuple[DTensor | None, ...]:
    """The gradient that the backward of `node` returns; None where the parameter has got it.

    node: the autograd node whose inputs are `parameters`, in whose backward this is called.
    grads: each parameter's gradient; its part is owned by nobody else, but for one of a backward
    that is differentiated again. Those are autograd's to store, and a copy is, of which DTensor
    makes even parts: what is at home on a rank of pp has none.
    """
    left = list(grads)
    if compat.compiling() or not STORE_DIRECTLY:  # a graph of the backward
        return tuple(left)
    again = torch.is_grad_enabled()
    leaves, unshared = _targets(node), _references_of_unshared()
    stores = compat.AccumulateGrad
    with compat.plain_attributes():
        for i, parameter in enumerate(parameters):
            grad = left[i]
            if (
                grad is not None
                and type(leaves[i]) is stores
                and not (again and home_of(parameter) is None)
                and parameter.grad is None
                and sys.getrefcount(leaves[i]) == unshared
                and compat.only_stores(leaves[i], parameter)
            ):
                parameter.grad = grad.clone() if again else grad
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


# Attributes of modules. Not in one record: Dynamo guards `_SYNC` in each call, and would guard the
# record, too.
_INSIDE = "_autoshard_inside_no_sync"
_SYNC = compat.READS_AS


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them over the data-parallel ranks.

    model: what torch.compile returned, or was given. Inside, a forward and its backward add their
    gradients to a pending sum, for the axes that `Config` defers: all of them for `dp_replicate`
    and for zero=1 or defer_reduction=True; otherwise `dp_shard` is reduced each time and
    `dp_replicate` waits. `.grad` is not touched for what waits. The first backward outside reduces
    the sum. What counts is where the forward runs. Does nothing where nothing is deferred.

        for i, batch in enumerate(batches):
            with autoshard.no_sync(model) if i + 1 < len(batches) else nullcontext():
                (model(**batch).loss / len(batches)).backward()
        optimizer.step()
    """
    modules = list(model.modules())
    before = [module.__dict__.get(_INSIDE, False) for module in modules]
    try:
        for module in modules:
            module.__dict__[_INSIDE] = True
            refresh(module)
        yield
    finally:
        for module, inside in zip(modules, before):
            if inside:
                continue
            module.__dict__.pop(_INSIDE, None)
            refresh(module)


def discard_pending(model: nn.Module) -> None:
    """Forget the gradients that `no_sync` accumulated and no backward has reduced.

    `zero_grad` does not: it knows `.grad` only. Every rank must do so alike.
    """
    for parameter in model.parameters():
        if (pending := pending_of(parameter)) is not None:
            pending.clear()


def on_backward_done(
    root: torch.Tensor, held: Sequence[tuple[Pending, torch.Tensor]], microbatch: str
) -> None:
    """Registers a hook that updates pending sums when the backward of `root` has run.

    root: an output of `unwrap`. held: the sums that the backward writes to, with their buffers,
    which the hook keeps alive for as long as the graph is.
    """
    if not held or root.grad_fn is None:
        return
    if microbatch == ACCUMULATE:
        _watch_optimizers()

    def finished(*_: Any) -> None:
        for pending, buffer in held:
            pending.finished(buffer, microbatch)

    root.grad_fn.register_hook(finished)


def refresh(module: nn.Module) -> None:
    """Set the attribute that the properties of a module with stored parameters read, and eager code
    of the parameters."""
    own = module.__dict__
    if _SYNC not in own:
        return
    parameters = [p for p in module._parameters.values() if p is not None]
    if not any(policy_of(p).deferred for p in parameters):
        own[_SYNC] = SINGLE
    elif own.get(_INSIDE):
        own[_SYNC] = ACCUMULATE
    elif own[_SYNC] == ACCUMULATE:
        own[_SYNC] = FLUSH
    for parameter in parameters:
        parameter.__dict__[_SYNC] = own[_SYNC]


def microbatch_of(parameter: torch.Tensor) -> str:
    """What a backward does with the gradient of a parameter that eager code reads now."""
    return parameter.__dict__.get(_SYNC, SINGLE) if torch.is_grad_enabled() else SINGLE


def begin(module: nn.Module) -> None:
    """Give a module that got stored parameters this attribute, by whether it is in `no_sync`."""
    module.__dict__.setdefault(_SYNC, SINGLE)
    refresh(module)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_pending)


@compat.not_traced
def _refuse_pending(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise where sums are pending: the step would silently train on a part of the gradient."""
    waiting = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            pending = pending_of(parameter)
            waiting += pending is not None and pending.dirty
    if waiting:
        raise AutoshardError(
            f"{type(optimizer).__name__}.step(): {waiting} parameters have gradients that were "
            "accumulated in no_sync and not reduced",
            remedy="Run forward and backward of the last microbatch outside of no_sync, or "
            "drop the gradients with autoshard.discard_pending(model).",
        )
