"""`unshard`: a stored parameter becomes whole on one data-parallel axis, in the dtype of compute.

    forward     cast, all-gather (nothing where every rank stores it whole)
    backward    add what is pending, cast, average, reduce-scatter or all-reduce, cast back

One autograd.Function does all of it: between two of them autograd would cast a gradient that is
to be reduced in fp32 to the low dtype of the weight it belongs to. So does one that is gathered in
a low dtype over two axes of shards: the cast comes before the first gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime.agreement import reducing, will_reduce
from autoshard.runtime.collectives import Axis, I, P, State, convert, gradient_value, reduce_wide
from autoshard.runtime.errors import AutoshardError

SINGLE, ACCUMULATE, FLUSH = "single", "accumulate", "flush"
"""Work of a backward on gradients: reduce its own; add them to the pending ones and reduce
nothing; reduce the pending ones and its own. Strings, because Dynamo makes an int symbolic."""

MICROBATCH = (SINGLE, ACCUMULATE, FLUSH)


Gather = tuple[State, Axis, int | None]
"""State, axis and extent, as `unshard` takes them; a tuple, so that a graph node can hold it."""


class ParameterPolicy(NamedTuple):
    """The use of stored parameters, and reduction of gradients, on the data-parallel axes.

    param: the dtype in which a parameter is gathered and computed with; None: as it is stored.
    reduce: the dtype in which its gradient travels; None: that of compute. accumulate: the dtype
    in which the ranks' gradients are summed; None: what the collective does. average: the mean
    over the ranks, else the sum. deferred: the axes that `no_sync` reduces over at the last
    microbatch only. gathered: False where each rank uses what it stores (experts on ep): its
    gradient is of the batches of all ranks already, and nothing is sent. A NamedTuple, so that a
    graph node can hold it as an argument.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    average: bool = True
    deferred: tuple[str, ...] = ()
    gathered: bool = True

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter is gathered and computed with."""
        return self.param if self.param is not None and stored.is_floating_point else stored

    def pending_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which microbatches are summed: the parameter's, or a wider one they travel
        in."""
        return stored if self.reduce is None else torch.promote_types(stored, self.reduce)


def unshard(
    x: torch.Tensor,
    src: State,
    axis: Axis,
    extent: int | None = None,
    use: ParameterPolicy = ParameterPolicy(),  # noqa: B008  (immutable)
    pending: torch.Tensor | None = None,
    microbatch: str = SINGLE,
    outer: Gather | None = None,
) -> torch.Tensor:
    """A stored parameter, whole on a data-parallel axis; its gradient is reduced over the axis.

    src: I (every rank stores it whole: DDP) or S(d) (FSDP). The ranks compute with different
    batches, so their gradients are divided before they are summed: the sum then cannot overflow,
    and the division fuses into the kernel that makes the gradient. extent: as in `redistribute`.
    pending: the sum of the microbatches before, of the result's shape; with ACCUMULATE the gradient
    is added to it and `x` gets none, with FLUSH it is reduced too and set to zero. outer: one more
    axis of shards, which is gathered over before and reduced over after.
    """
    if axis.size == 1:
        return x
    if not (x.is_floating_point() or x.is_complex()):
        return convert(x if outer is None else _gathered(x, outer), src, I, axis, extent)
    out = _Unshard.apply(x, src, axis, extent, use, pending, microbatch, outer)
    # no compiler traces; a graph of AOTAutograd is recorded as a whole
    if type(out) is torch.Tensor and out.grad_fn is not None and use.gathered:
        if microbatch != ACCUMULATE:
            will_reduce(out.grad_fn, _reduced_axes(axis, outer))
    return out


def _reduced_axes(axis: Axis, outer: Gather | None) -> list[Axis]:
    return [axis] if outer is None else [axis, outer[1]]


def _gathered(x: torch.Tensor, over: Gather) -> torch.Tensor:
    state, axis, extent = over
    return convert(x, state, I, axis, extent)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        src: State,
        axis: Axis,
        extent: int | None,
        use: ParameterPolicy,
        pending: torch.Tensor | None,
        microbatch: str,
        outer: Gather | None,
    ) -> torch.Tensor:
        ctx.of = (x.dtype, src, axis, extent, use, microbatch, outer)
        # not save_for_backward: microbatches write to it between this forward and its backward
        ctx.pending = pending
        if microbatch == SINGLE:  # no gradient comes from an axis inside on which it waits
            ctx.set_materialize_grads(False)
        low = x if use.param is None or x.is_complex() else x.to(use.param)
        low = low if outer is None else _gathered(low, outer)
        out = convert(low, src, I, axis, extent) if use.gathered else low
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        dtype, src, axis, extent, use, microbatch, outer = ctx.of
        nothing = (None,) * 7
        if grad is None:
            return None, *nothing
        if grad.is_sparse:  # of a sparse embedding
            grad = grad.to_dense()
        again = torch.is_grad_enabled() and grad.requires_grad
        if again and microbatch == ACCUMULATE:
            raise AutoshardError(
                "a second derivative (create_graph=True) inside autoshard.no_sync, where the "
                "gradients of the ranks wait for each other",
                remedy="Run the forward whose gradient is differentiated outside of no_sync.",
            )
        if microbatch == ACCUMULATE:
            ctx.pending.add_(grad)
            return None, *nothing
        if microbatch == FLUSH and ctx.pending is not None:
            grad = ctx.pending + grad
            ctx.pending.zero_()
        met = use.gathered and type(grad) is torch.Tensor  # no compiler traces
        with reducing(_reduced_axes(axis, outer) if met else ()):
            if again:
                return _Reduce.apply(grad, dtype, src, axis, extent, use, outer), *nothing
            return _reduced_over(grad, src, axis, use, outer).to(dtype), *nothing


class _Reduce(torch.autograd.Function):
    """The backward of `_Unshard` where it is differentiated again: each is the other's backward.

    With the mean over the ranks too: what a rank computes counts 1/n in the loss of them all, and
    so does its part of a second derivative, by the mean that it meets on its way to the parameter.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        grad: torch.Tensor,
        dtype: torch.dtype,
        src: State,
        axis: Axis,
        extent: int | None,
        use: ParameterPolicy,
        outer: Gather | None,
    ) -> torch.Tensor:
        ctx.of = (src, axis, extent, use, None, SINGLE, outer)
        return _reduced_over(grad, src, axis, use, outer).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return unshard(grad, *ctx.of), *(None,) * 6


def _reduced_over(
    grad: torch.Tensor, src: State, axis: Axis, use: ParameterPolicy, outer: Gather | None
) -> torch.Tensor:
    found = reduced(grad, gradient_value(src), axis, use)
    if outer is None:
        return found
    return reduced(found, gradient_value(outer[0]), outer[1], use._replace(gathered=True))


def reduced(grad: torch.Tensor, dst: State, axis: Axis, use: ParameterPolicy) -> torch.Tensor:
    """The ranks' gradients summed or averaged over the axis, to I or S(d)."""
    if not use.gathered:
        return grad / axis.size if use.average else grad
    if grad.is_complex():
        use = use._replace(reduce=None, accumulate=None)
    if use.reduce is not None:
        grad = grad.to(use.reduce)
    if use.average:
        grad = grad / axis.size
    if use.accumulate is not None and use.accumulate != grad.dtype:
        return reduce_wide(grad, dst, axis, use.accumulate)
    return convert(grad, P, dst, axis)


def deferred_at(axes: Sequence[Axis], use: ParameterPolicy) -> int | None:
    """The position of the axis at which gradients wait: the innermost that `use` defers.

    axes: those of more than one rank, outermost first. Backward passes them from the last to the
    first; what is before the position waits too.
    """
    found = [i for i, axis in enumerate(axes) if axis.name in use.deferred and axis.size > 1]
    return found[-1] if found else None
