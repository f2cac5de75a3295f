"""Gradient accumulation: which gradients wait, where, and until when.

Inside `no_sync` every module that owns stored parameters says so in one attribute, which the
property of its parameters reads and Dynamo guards: a model has at most three variants of each of
its graphs (`MICROBATCH`), and none is compiled again. An accumulating backward adds to a
pending sum a parameter, outside of `.grad`; the first backward whose forward ran outside of the
context reduces the sum with its own gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, message
from autoshard.runtime.parameters.data_unsharding import ACCUMULATE, FLUSH, SINGLE
from autoshard.runtime.parameters.record import Pending, pending_of, policy_of

# Attributes of modules. Not in one record: Dynamo guards `_SYNC` in each call, and would guard the
# record, too.
_INSIDE = "_autoshard_inside_no_sync"
_SYNC = "_autoshard_sync"


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


_watching = False


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        _watching = True
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
            message(
                f"{type(optimizer).__name__}.step(): {waiting} parameters have gradients that were "
                "accumulated in no_sync and not reduced",
                remedy="Run forward and backward of the last microbatch outside of no_sync, or "
                "drop the gradients with autoshard.discard_pending(model).",
            )
        )
