"""data_parallel: a stored parameter becomes whole on the data-parallel axes before its first use.

    before (dp_shard=2, one rank)                   after
    %w: f32[16,8]                                   %w: f32[8,8]
    %x: f32[2,8]                                    %x: f32[2,8]
    %0: f32[2,16] = linear(%x, %w)                  %1: f32[16,8] = unshard(%w, S(0), dp_shard)
                                                    %0: f32[2,16] = linear(%x, %1)

Runs on the local graph, after `localize`: the batch of a data-parallel rank is its own, so nothing
but parameters changes. `unshard` is one state change to R: forward the all-gather of FSDP (nothing,
where the parameter is stored whole), backward the reduce-scatter or all-reduce of the averaged
gradient. Where several axes exist the change on `dp_replicate` comes first, so that backward
scatters over the others before it reduces the shard. Of experts that `exchange_experts` leaves
where they are stored on `ep`, `unshard` on that axis only averages the gradient.

Where the model is computed in a lower dtype than it is stored in, the captured graph has its
parameters in that dtype; here they get the stored one, and the last `unshard` casts (a cast of its
own, where there is none). Where two axes split a parameter, one `unshard` does both, so that both
gathers are of the lower dtype, and the gradient keeps the dtype it is reduced in between them.

Over a cp that stands beside tp, weights are gathered likewise, as the innermost axis; the gradient
is summed: its ranks compute with parts of one batch.

A graph that accumulates gradients, or reduces accumulated ones, gets one more input a parameter at
its end: the pending sum, which `unshard` on the innermost deferred axis writes to in backward. In
an accumulating graph the axes outside of that one are left out: no gradient reaches them.

Not done: bucketing and scheduling, which are passes over the forward and backward graphs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import (
    Context,
    Pass,
    Report,
    local_value,
    maker,
    set_recomputed,
    set_region,
)
from autoshard.passes.lib.bucketing import kind_of
from autoshard.runtime.collectives import DATA_AXES, TWICE, Axis, I, State, shard_dim
from autoshard.runtime.graph_meta import BUCKET, CHANGE, OWN_AXIS, PENDING_INPUTS
from autoshard.runtime.parameters import (
    ACCUMULATE,
    SINGLE,
    ParameterPolicy,
    deferred_at,
    extents,
    unshard,
)


class PendingInput(NamedTuple):
    """A further input of the local graph: the pending gradient of a parameter.

    parameter: the index of its placeholder. shape, dtype: of the sum.
    """

    parameter: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class DataParallel(Pass):
    """States of the stored parameters, by the position of their placeholder.

    axes: `gathering_axes`, `dp_replicate` first. states: {placeholder index: {axis: state}}.
    regather: gather again in backward instead of keeping the whole weight since forward (ZeRO-3).
    choices: {placeholder index: what dp_shard does}, of `CHOICES`, where each weight has its own.
    use: dtypes, averaging and deferral. dtypes: {placeholder index: stored dtype}, where it is not
    that of the graph. microbatch: what backward does with gradients (`unshard.MICROBATCH`).
    """

    axes: tuple[Axis, ...]
    states: Mapping[int, Mapping[str, State]]
    regather: bool = True
    choices: Mapping[int, str] = field(default_factory=dict)
    use: ParameterPolicy = ParameterPolicy()
    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)
    microbatch: str = SINGLE

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Insert the changes; the placeholders get the shapes and dtypes of what is stored.

        `gm.meta[PENDING_INPUTS]` lists the further inputs, as `PendingInput`.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        gm.meta[PENDING_INPUTS] = []
        for index, states in self.states.items():
            node = placeholders[index]
            whole = node.meta["val"]
            # what a rank holds of experts is all that it uses of them
            inside = {name: at for name, at in states.items() if name != node.meta.get(OWN_AXIS)}
            node.meta["val"] = self._stored(index, inside, whole)
            if not node.users:
                continue
            first = min(node.users)
            users = dict(node.users)
            pending = self._pending(gm, index, node, inside, whole)
            with gm.graph.inserting_before(first):
                at = self._change(index, node, first, inside, whole, pending)
            for user in users:
                user.replace_input_with(node, at)
            report.hits += 1

    def _stored(self, index: int, states: Mapping[str, State], whole: torch.Tensor) -> torch.Tensor:
        val = _local(whole, states, self.axes)
        dtype = self.dtypes.get(index, val.dtype)
        if dtype == val.dtype:
            return val
        return torch.empty_like(val, dtype=dtype).requires_grad_(val.requires_grad)

    def _pending(
        self,
        gm: fx.GraphModule,
        index: int,
        node: fx.Node,
        states: Mapping[str, State],
        whole: torch.Tensor,
    ) -> fx.Node | None:
        """The further input for a parameter whose gradient waits on some axis."""
        at = deferred_at(self.axes, self.use)
        if at is None or self.microbatch == SINGLE or not whole.requires_grad:
            return None
        inside = _local(whole, states, self.axes[at + 1 :])
        dtype = self.use.pending_dtype(node.meta["val"].dtype)
        last = gm.graph.find_nodes(op="placeholder")[-1]
        with gm.graph.inserting_after(last):
            new = gm.graph.placeholder(f"pending_{node.name}")
        new.meta["val"] = torch.empty_like(inside, dtype=dtype).detach()
        gm.meta[PENDING_INPUTS].append(PendingInput(index, tuple(inside.shape), dtype))
        return new

    def _change(
        self,
        index: int,
        node: fx.Node,
        user: fx.Node,
        states: Mapping[str, State],
        whole: torch.Tensor,
        pending: fx.Node | None,
    ) -> fx.Node:
        sizes = extents(whole.shape, states, self.axes)
        waits = None if pending is None else deferred_at(self.axes, self.use)
        chain = [
            axis
            for i, axis in enumerate(self.axes)
            if (whole.requires_grad or states.get(axis.name, I) != I)
            and not (
                waits is not None
                and self.microbatch == ACCUMULATE
                and i < waits
                and states.get(axis.name, I) == I
            )
        ]
        lower = whole.dtype if index in self.dtypes else None
        kind = kind_of(node)

        def made(
            target: Any, args: list[Any], change: str, custom: dict[str, str], **kwargs: Any
        ) -> fx.Node:
            custom = {**custom, CHANGE: f"{node.name}: {change}"}
            make = maker(user, self.name, value="unknown", custom=custom)
            new = make(target, *args, **kwargs)
            set_region(new, None)
            return new

        def gather(axis: Axis) -> tuple[State, Axis, int | None]:
            state, size = states.get(axis.name, I), sizes.get(axis.name)
            return state, axis, size if size is not None and size % axis.size else None

        outer = None
        if lower is not None and len(chain) > 1 and states.get(chain[-2].name, I) != I:
            outer = gather(chain.pop(-2))
        at = node
        for axis in chain:
            args: list[Any] = [at, *gather(axis)]
            state, both = args[1], outer if axis == chain[-1] else None
            use = self.use._replace(
                deferred=(),
                average=self.use.average and axis.name in DATA_AXES,
                param=lower if axis == chain[-1] else None,
                gathered=axis.name != node.meta.get(OWN_AXIS),
            )
            holds = waits is not None and axis == self.axes[waits]
            if use != ParameterPolicy() or holds:
                args.append(use)
            if holds:
                args += [pending, self.microbatch]
            custom = {BUCKET: kind} if kind else {}
            split = state if both is None else both[0]
            change = f"{split} -> R" if use.gathered or both else "mean"
            at = made(unshard, args, change, custom, **({"outer": both} if both else {}))
            if shard_dim(split) is not None:
                own = self.choices.get(index)
                set_recomputed(at, self.regather if own is None else own == TWICE)
        if not chain and lower is not None:
            casts = f"{self.dtypes[index]} -> {lower}"
            at = made(torch.ops.aten._to_copy.default, [at], casts, {}, dtype=lower)
        if at is not node:
            at.meta["val"] = whole
        return at


def _local(whole: torch.Tensor, states: Mapping[str, State], axes: Sequence[Axis]) -> torch.Tensor:
    for axis in reversed(axes):
        whole = local_value(whole, states.get(axis.name, I), axis)
    return whole
