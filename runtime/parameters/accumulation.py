"""Gradient accumulation: which gradients wait, where, and until when.

Inside `no_sync` every module that owns stored parameters says so in one attribute, which the
property of its parameters reads and Dynamo guards: a model has at most three variants of each of
its graphs (`unshard.MICROBATCH`), and none is compiled again. An accumulating backward adds to a
pending sum a parameter, outside of `.grad`; the first backward whose forward ran outside of the
context reduces the sum with its own gradient.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autoshard.runtime.errors import AutoshardError, message
from autoshard.runtime.parameters.data_unsharding import ACCUMULATE, FLUSH, SINGLE, Use

_INSIDE = "_autoshard_inside_no_sync"
_SYNC = "_autoshard_sync"
_USE = "_autoshard_use"
_PENDING = "_autoshard_pending"


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


def pending_bytes(model: nn.Module) -> int:
    """Bytes that pending gradients hold on this rank."""
    found = (pending_of(parameter) for parameter in model.parameters())
    return sum(p.sum.nbytes for p in found if p is not None and p.sum is not None)


class Pending:
    """The unreduced gradient of one parameter.

    It exists from the first accumulating forward to the end of the backward that reduces it, and
    as long as a graph that will write to it waits for its backward.
    """

    def __init__(self) -> None:
        self.sum: torch.Tensor | None = None
        self.dirty = False
        self._last: weakref.ref[torch.Tensor] | None = None

    def __reduce__(self) -> Any:
        return Pending, ()  # a copy of the model starts with none

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer; zeros where there is none."""
        if self.sum is None and self._last is not None:
            self.sum = self._last()
        if self.sum is None:
            self.sum = torch.zeros(tuple(shape), dtype=dtype, device=device)
            self._last = weakref.ref(self.sum)
        return self.sum

    def clear(self) -> None:
        """Forget the sum, also for graphs that wait for their backward."""
        if self.sum is not None:
            self.sum.zero_()
        self.sum, self.dirty = None, False

    def finished(self, buffer: torch.Tensor, microbatch: str) -> None:
        """A backward has written to `buffer`."""
        self.dirty = microbatch == ACCUMULATE
        self.sum = buffer if self.dirty else None


def attend(
    root: torch.Tensor, held: Sequence[tuple[Pending, torch.Tensor]], microbatch: str
) -> None:
    """After the backward of `root` (an output of `unwrap`): its pending sums grew, or are gone.

    The hook also keeps the buffers alive for as long as the graph is.
    """
    if not held or root.grad_fn is None:
        return
    if microbatch == ACCUMULATE:
        _watch_optimizers()

    def finished(*_: Any) -> None:
        for pending, buffer in held:
            pending.finished(buffer, microbatch)

    root.grad_fn.register_hook(finished)


def use_of(parameter: torch.Tensor) -> Use:
    """How a parameter is used; the default where nothing has been said."""
    return getattr(parameter, "__dict__", {}).get(_USE) or Use()


def is_used(parameter: torch.Tensor) -> bool:
    """Whether `set_use` has been called for the parameter."""
    return _USE in parameter.__dict__


def set_use(parameters: Iterable[torch.Tensor], use: Use) -> None:
    """Say how parameters are used; moves with them when they are stored."""
    for parameter in parameters:
        parameter.__dict__[_USE] = use
        parameter.__dict__.setdefault(_PENDING, Pending())


def pending_of(parameter: torch.Tensor) -> Pending | None:
    """The pending gradient of a parameter of which `set_use` was told."""
    return getattr(parameter, "__dict__", {}).get(_PENDING)


def refresh(module: nn.Module) -> None:
    """Set what the properties of a module with stored parameters read."""
    own = module.__dict__
    if _SYNC not in own:
        return
    waits = any(use_of(p).deferred for p in module._parameters.values() if p is not None)
    if not waits:
        own[_SYNC] = SINGLE
    elif own.get(_INSIDE):
        own[_SYNC] = ACCUMULATE
    elif own[_SYNC] == ACCUMULATE:
        own[_SYNC] = FLUSH


def begin(module: nn.Module) -> None:
    """Give a module that got stored parameters the attribute, right for where it is."""
    module.__dict__.setdefault(_SYNC, SINGLE)
    refresh(module)


_watching = False


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_refuse_pending)


def _refuse_pending(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step without them would train on a part of the gradient, silently."""
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
