"""data_parallel: a stored parameter becomes whole on the data-parallel axes before its first use.

    before (dp_shard=2, one rank)                   after
    %w: f32[16,8]                                   %w: f32[8,8]
    %x: f32[2,8]                                    %x: f32[2,8]
    %0: f32[2,16] = linear(%x, %w)                  %1: f32[16,8] = unshard(%w, S(0), dp_shard)
                                                    %0: f32[2,16] = linear(%x, %1)

Runs on the local graph, after `localize`: the batch of a data-parallel rank is its own, so nothing
but parameters changes. `unshard` is one state change to V: forward the all-gather of FSDP (nothing,
where the parameter is stored whole), backward the reduce-scatter or all-reduce of the averaged
gradient. Where both axes exist the change on `dp_replicate` comes first, so that backward scatters
over `dp_shard` and then reduces only the shard.

Not done: bucketing and scheduling, which are passes over the forward and backward graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.passes.base import Context, Report
from autoshard.passes.buckets import KIND, kind_of
from autoshard.passes.localize import local_value
from autoshard.runtime.axis import Axis
from autoshard.runtime.collectives import unshard
from autoshard.runtime.placement import R, State, shard_dim
from autoshard.runtime.storage import extents

# Later than every region of activation checkpointing: a gather that is used inside one must not
# count as its boundary, which is saved (slice2.md, section 5).
_LAST_REGION = 1 << 30


@dataclass(frozen=True)
class DataParallel:
    """States of the stored parameters, by the position of their placeholder.

    axes: the data-parallel axes, `dp_replicate` first. states: {placeholder index: {axis: state}}.
    regather: gather again in backward instead of keeping the whole weight since forward (ZeRO-3).
    """

    name: ClassVar[str] = "data_parallel"
    axes: tuple[Axis, ...]
    states: Mapping[int, Mapping[str, State]]
    regather: bool = True

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Insert the changes; the placeholders get the shapes of the stored parts."""
        report = Report(self.name)
        nodes = list(gm.graph.nodes)
        position = {node: i for i, node in enumerate(nodes)}
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for index, states in self.states.items():
            node = placeholders[index]
            sizes = extents(node.meta["val"].shape, states, self.axes)
            for axis in reversed(self.axes):
                node.meta["val"] = local_value(node.meta["val"], states.get(axis.name, R), axis)
            if not node.users:
                continue
            first = min(node.users, key=position.__getitem__)
            users = dict(node.users)
            kind = kind_of(node)
            at = node
            with gm.graph.inserting_before(first):
                for axis in self.axes:
                    at = self._unshard(gm.graph, at, node, first, axis, states, sizes, kind)
            for user in users:
                user.replace_input_with(node, at)
            report.hits += 1
        gm.recompile()
        return report

    def _unshard(
        self,
        graph: fx.Graph,
        at: fx.Node,
        parameter: fx.Node,
        user: fx.Node,
        axis: Axis,
        states: Mapping[str, State],
        sizes: Mapping[str, int],
        kind: str,
    ) -> fx.Node:
        state = states.get(axis.name, R)
        if state == R and not _trained(parameter):
            return at
        size = sizes.get(axis.name)
        uneven = size if size is not None and size % axis.size else None
        new = graph.call_function(unshard, (at, state, axis, uneven))
        custom: dict[str, Any] = dict(user.meta.get("custom", {}))
        custom["autoshard_change"] = f"{parameter.name}: {state} -> V"
        if kind:
            custom[KIND] = kind
        new.meta = {"custom": custom}
        for key in ("nn_module_stack", "stack_trace"):
            if key in user.meta:
                new.meta[key] = user.meta[key]
        if shard_dim(state) is not None:
            new.meta["recompute"] = (
                CheckpointPolicy.MUST_RECOMPUTE if self.regather else CheckpointPolicy.MUST_SAVE
            )
            new.meta["ac_graph_id"] = _LAST_REGION
        return new


def _trained(parameter: fx.Node) -> bool:
    val = parameter.meta["val"]
    return isinstance(val, torch.Tensor) and val.requires_grad
