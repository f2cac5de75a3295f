"""exchange_experts: on the axis ep, rows travel to their experts, whose weights stay.

    before (ep=2, one rank; after localize)         after
    %x: f32[6,8]                                    %x: f32[6,8]
    %up: f32[4,16,8]                                %up: f32[2,16,8]
    %down: f32[4,8,16]                              %down: f32[2,8,16]
    %0: f32[6,8] = experts(%x, %ids, %weights,      %0: f32[6,8] = exchanged_experts(%x, %ids,
        [%up, %down], body)                             %weights, [%up, %down], body, axis=ep)

The axis is one of data parallelism: each rank has a batch of its own, and a parameter is stored by
rows over it, which of a stack of experts are whole experts. So the mixture may read what the rank
stores, and `data_parallel` gathers everything but that. The gradient of an expert comes of the rows
of all ranks, and is reduced over the other axes only.

Not done: mixtures that `match_experts` did not find; stacks that something else reads too, or that
are computed; fewer experts than ranks; experts whose numbers may not be finite for a row of zeros.
Their weights are gathered as those of any other layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from autoshard.passes.base import Context, Report, local_value
from autoshard.planning import not_of_zero, shardable
from autoshard.runtime.collectives import Axis, I, S, State
from autoshard.runtime.graph_meta import CHANGE, OWN_AXIS
from autoshard.runtime.operators import EXPERTS, Bound, exchanged_experts


@dataclass(frozen=True)
class ExchangeExperts:
    """axis: ep. states: of the stored parameters on the data-parallel axes, as in DataParallel."""

    name: ClassVar[str] = "exchange_experts"
    optional: ClassVar[bool] = False
    axis: Axis
    states: Mapping[int, Mapping[str, State]] = field(default_factory=dict)

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite the mixtures; placeholders of their stacks get `meta[OWN_AXIS]`."""
        report = Report(self.name)
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        stored = {
            placeholders[i]
            for i, states in self.states.items()
            if states.get(self.axis.name, I) == S(0)
        }
        mixtures = [node for node in gm.graph.nodes if node.target is EXPERTS]
        for node in mixtures:
            stacks: Any = node.args[3]
            reason = self._declined(stacks, stored) or not_of_zero(node.args[4])
            if reason:
                report.skip(node, reason)
                continue
            experts = stacks[0].meta["val"].shape[0]
            for stack in stacks:
                stack.meta[OWN_AXIS] = self.axis.name
                stack.meta["val"] = local_value(stack.meta["val"], S(0), self.axis)
            node.target = Bound.of(exchanged_experts, experts=experts)
            node.kwargs = {"axis": self.axis}
            change = f"{node.name}: rows to their experts and back"
            node.meta["custom"] = {**node.meta.get("custom", {}), CHANGE: change}
            report.hits += 1
        return report

    def _declined(self, stacks: list[fx.Node], stored: set[fx.Node]) -> str:
        """Why the stacks of a mixture are gathered; "" where they need not be."""
        if any(stack not in stored for stack in stacks):
            return "a stack of experts is computed, or is not stored by experts"
        if any(len(stack.users) > 1 for stack in stacks):
            return "a stack of experts is read by something else too"
        first, n = stacks[0].meta["val"], self.axis.size
        return "" if S(0) in shardable(first, n) else f"{first.shape[0]} experts on {n} ranks"
