"""`StageUnsharding`: the parameters of a pipeline's stage, whole on the data-parallel axes for a
call.

    before the schedule     cast, one all-gather a bucket (none where every rank stores the whole)
    backward of the loss    one reduce-scatter or all-reduce a bucket, after that of all
                            micro-batches, cast back

A stage reads its parameters once a micro-batch: `unshard` in its graph would move them as often.
Its gradients add up in a wider dtype than that of compute, in which autograd would hand them on;
so they arrive at a handle of the wider dtype, a tensor without memory, and not at what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from autoshard.runtime.collectives import (
    DATA_AXES,
    Axis,
    I,
    S,
    all_gather,
    chunk_bounds,
    chunk_size,
)
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.data_unsharding import (
    ACCUMULATE,
    FLUSH,
    SINGLE,
    ParameterPolicy,
    deferred_at,
    reduced,
)
from autoshard.runtime.parameters.gradients import on_backward_done
from autoshard.runtime.parameters.layout import extents, stored_states
from autoshard.runtime.parameters.record import pending_of
from autoshard.runtime.parameters.unsharding import unwrap

Sizes = list[dict[str, int]]
"""Of each parameter, by axis of shards: the rows that a gather over it restores."""


class StageParameters(NamedTuple):
    """values: what a stage reads, outside of autograd. handles: of their shapes, and of the dtype
    in which gradients of micro-batches add up; the gradient of one becomes the parameter's."""

    values: list[torch.Tensor]
    handles: list[torch.Tensor]


@dataclass(frozen=True)
class StageUnsharding:
    """axes: those of data parallelism, outermost first, and a cp, whose ranks compute with parts of
    one batch: gradients are summed over it. buckets: parameters by their position in
    what it is given, each bucket of one dtype and one placement, all trained or all frozen; those
    in none stay as they are. region: what the backward's collectives run in. stays: the axis on
    which a parameter is used as it is stored (experts on ep), by its position: its gradient is of
    the batches of all ranks already.
    """

    axes: tuple[Axis, ...]
    buckets: Sequence[Sequence[int]]
    use: ParameterPolicy
    microbatch: str
    region: AbstractContextManager[None]
    stays: Mapping[int, str] = field(default_factory=dict)

    def __call__(self, parameters: Sequence[DTensor]) -> StageParameters:
        """What this rank stores of each, cast and gathered. Collective over `axes`."""
        local = unwrap(*parameters)
        sums = [self.use.pending_dtype(x.dtype) if x.requires_grad else x.dtype for x in local]
        low = [self.use.compute_dtype(x.dtype) for x in local]
        if not any(self.buckets) and all(a == b == x.dtype for a, b, x in zip(sums, low, local)):
            return StageParameters(list(local), list(local))
        sizes = [
            extents(p.shape, stored_states(p), axes_of(p.device_mesh)) if p.dim() else {}
            for p in parameters
        ]
        for i, axis_name in self.stays.items():
            del sizes[i][axis_name]
        waits = deferred_at(self.axes, self.use)
        held: dict[int, Any] = {}
        if self.microbatch != SINGLE and waits is not None and torch.is_grad_enabled():
            for i in (i for bucket in self.buckets for i in bucket):
                pending = pending_of(parameters[i])
                if pending is None or not parameters[i].requires_grad:
                    continue
                shape = list(local[i].shape)
                for axis in self.axes[: waits + 1]:
                    shape[:1] = [sizes[i][axis.name]] if axis.name in sizes[i] else shape[:1]
                dtype = self.use.pending_dtype(parameters[i].dtype)
                held[i] = pending, pending.take(shape, dtype, local[i].device)
            root = next((x for x in local if x.requires_grad), None)
            if root is not None:
                on_backward_done(root, list(held.values()), self.microbatch)
        # two calls may precede one backward: the alias has a version counter of its own
        pending_sums = {i: buffer.data for i, (_, buffer) in held.items()}
        with torch.no_grad():
            values = self.gather([x.detach().to(dtype) for x, dtype in zip(local, low)], sizes)
        for value, x in zip(values, local):
            value.requires_grad_(x.requires_grad)
        of = [(value.shape, dtype) for value, dtype in zip(values, sums)]
        handles = _OfStage.apply(self, sizes, waits, pending_sums, of, *local)
        return StageParameters(values, list(handles))

    def gather(self, parts: list[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """The wholes of parameters, over one axis after the other."""
        for axis in self.axes:
            for bucket in self.buckets:
                if axis.name in sizes[bucket[0]]:
                    rows = [sizes[i][axis.name] for i in bucket]
                    wholes = _gathered([parts[i] for i in bucket], rows, axis)
                    for i, whole in zip(bucket, wholes):
                        parts[i] = whole
        return parts

    def reduce(self, grads: list[torch.Tensor | None], sizes: Sizes, axis: Axis) -> None:
        """Sum or average gradients over one axis, in place of those in the list."""
        for bucket in self.buckets:
            present = [i for i in bucket if grads[i] is not None]
            if present:
                given: list[Any] = [grads[i] for i in present]
                rows = [sizes[i].get(axis.name) for i in present]
                use = self.use._replace(
                    average=self.use.average and axis.name in DATA_AXES,
                    gathered=self.stays.get(bucket[0]) != axis.name,
                )
                for i, own in zip(present, _reduced(given, rows, axis, use)):
                    grads[i] = own


class _OfStage(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        how: StageUnsharding,
        sizes: Sizes,
        waits: int | None,
        pending: dict[int, torch.Tensor],
        of: Sequence[tuple[torch.Size, torch.dtype]],
        *local: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # not save_for_backward: microbatches write to the sums between this forward and its
        # backward
        ctx.of = how, sizes, waits, pending, [x.dtype for x in local]
        handles = [x.new_empty((), dtype=dtype).expand(s) for x, (s, dtype) in zip(local, of)]
        ctx.mark_non_differentiable(*[x for x, p in zip(handles, local) if not p.requires_grad])
        return tuple(handles)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        how, sizes, waits, pending, dtypes = ctx.of
        found = list(grads)
        with how.region:
            for at in reversed(range(len(how.axes))):
                if at == waits and how.microbatch == ACCUMULATE:
                    _add(pending, found)
                    break
                if at == waits and how.microbatch == FLUSH:
                    _flush(pending, found)
                how.reduce(found, sizes, how.axes[at])
        own = [None if x is None else x.to(dtype) for x, dtype in zip(found, dtypes)]
        return None, None, None, None, None, *own


def _add(pending: dict[int, torch.Tensor], grads: list[torch.Tensor | None]) -> None:
    for i, buffer in pending.items():
        own, grads[i] = grads[i], None
        if own is not None:
            buffer.add_(own)


def _flush(pending: dict[int, torch.Tensor], grads: list[torch.Tensor | None]) -> None:
    for i, buffer in pending.items():
        own = grads[i]
        grads[i] = buffer.clone() if own is None else buffer + own
        buffer.zero_()


def _gathered(parts: list[torch.Tensor], rows: list[int], axis: Axis) -> list[torch.Tensor]:
    chunks = [chunk_size(extent, axis.size) for extent in rows]
    flat = [_padded(x, chunk).reshape(-1) for x, chunk in zip(parts, chunks)]
    together = all_gather(flat[0] if len(flat) == 1 else torch.cat(flat), axis)
    blocks = together.view(axis.size, -1).split([x.numel() for x in flat], dim=1)
    return [
        block.reshape(axis.size * chunk, *part.shape[1:]).narrow(0, 0, extent)
        for block, chunk, part, extent in zip(blocks, chunks, parts, rows)
    ]


def _reduced(
    grads: list[torch.Tensor], rows: Sequence[int | None], axis: Axis, use: ParameterPolicy
) -> list[torch.Tensor]:
    n = axis.size
    if rows[0] is None:
        sums = reduced(torch.cat([x.reshape(-1) for x in grads]), I, axis, use)
        blocks = sums.split([x.numel() for x in grads])
        return [block.view(x.shape).to(x.dtype) for block, x in zip(blocks, grads)]
    chunks = [chunk_size(x.shape[0], n) for x in grads]
    flat = [_padded(x, n * chunk).reshape(n, -1) for x, chunk in zip(grads, chunks)]
    own = reduced(torch.cat(flat, dim=1), S(0), axis, use).view(-1)
    return [
        block.view(chunk, *x.shape[1:]).narrow(0, 0, chunk_bounds(x.shape[0], axis)[1]).to(x.dtype)
        for block, chunk, x in zip(own.split([x.shape[1] for x in flat]), chunks, grads)
    ]


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - x.shape[0]
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x
