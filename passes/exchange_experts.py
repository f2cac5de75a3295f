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

Beside a planned axis (tp or cp) the mixture keeps the algorithm that the plan chose there, and what
a rank of that axis has left to compute travels over ep: all rows where each expert is split inside,
those of its tokens where tokens are split, those of its experts where experts are, which then are
split over both axes. A cp that stands beside tp is gathered over, as dp_shard is, but splits rows
before ep does: a rank of ep then has rows of as many parts. What is gathered of a stack on the
planned axis is not gathered on ep. Stacks of one mixture whose experts are stored in two orders, by
planned ranks first or not at all, cannot all stay: those of fewer bytes are gathered.

Not done: mixtures of which the plan gathers the stacks, because that is cheaper; those that
`match_experts` did not find; stacks that something else reads too, or that
are computed; fewer experts than ranks; experts whose numbers may not be finite for a row of zeros;
stacks that are split by experts on a planned axis too, unless both axes divide them. Their weights
are gathered as those of any other layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from autoshard.passes.base import Context, Pass, Report, local_value, maker
from autoshard.planning import not_of_zero, shardable
from autoshard.runtime.collectives import Axis, I, S, State, redistribute
from autoshard.runtime.graph_meta import CHANGE, OWN_AXIS
from autoshard.runtime.operators import (
    EXPERTS,
    Bound,
    exchanged_experts,
    owned_experts,
    rank_rows,
    split_experts,
    unbound,
)

_BY_EXPERTS = (owned_experts, exchanged_experts)  # of which a planned rank has whole experts


class _Declined(Exception):
    """The stacks of a mixture are gathered; the text says why."""


class _Stack(NamedTuple):
    """A stack on its way to its mixture.

    nodes: its placeholder, and its changes of state on the planned axis. strided: whether ranks of
    that axis gather what each of them stores, by experts.
    """

    nodes: list[fx.Node]
    strided: bool


@dataclass(frozen=True)
class ExchangeExperts(Pass):
    """axis: ep. states: of the stored parameters on the data-parallel axes, as in DataParallel.
    outer: cp beside tp, which splits rows before ep does, and over which every stack is gathered.
    gathered: the positions of placeholders of stacks that the plan gathers over ep.
    """

    axis: Axis
    states: Mapping[int, Mapping[str, State]] = field(default_factory=dict)
    outer: Axis | None = None
    gathered: frozenset[int] = frozenset()

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite the mixtures; placeholders of their stacks get `meta[OWN_AXIS]`."""
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        stored = {
            placeholders[i]
            for i, states in self.states.items()
            if states.get(self.axis.name, I) == S(0)
        }
        gathered = {placeholders[i] for i in self.gathered}
        for node in [one for one in gm.graph.nodes if _function(one) in _MIXTURES]:
            try:
                self._replace(node, stored, gathered, ctx.axis)
            except _Declined as reason:
                report.skip(node, str(reason))
            else:
                report.hits += 1

    def _replace(
        self, node: fx.Node, stored: set[fx.Node], gathered: set[fx.Node], planned: Axis
    ) -> None:
        """Rewrite one mixture, if its stacks may stay."""
        stacks: Any = node.args[3]
        function, constants = unbound(node.target)  # type: ignore[arg-type]
        by_experts = function in _BY_EXPERTS
        if reason := not_of_zero(node.args[4]):  # type: ignore[arg-type]
            raise _Declined(reason)
        found = [_read(stack, stored) for stack in stacks]
        if any(one.nodes[0] in gathered for one in found):
            raise _Declined("the plan gathers its weights, which is cheaper")
        sizes = {True: 0, False: 0}
        for one in found:
            sizes[one.strided] += math.prod(one.nodes[-1].meta["val"].shape)
        strided, n = sizes[True] > sizes[False], self.axis.size
        before = 1 if self.outer is None else self.outer.size
        own = stacks[0].meta["val"]
        experts = node.kwargs.get("experts", own.shape[0])
        ranks = before * (planned.size if by_experts or sizes[True] else 1)
        if ranks > 1 and experts % (ranks * n):  # type: ignore[operator]
            raise _Declined(f"{experts} experts on {ranks} x {n} ranks")
        if S(0) not in shardable(own, n):
            raise _Declined(f"{own.shape[0]} experts on {n} ranks")
        count = before * (planned.size if strided else 1)
        parts = {"parts": count} if count > 1 else {}
        node.update_arg(3, [self._own(one, node, one.strided == strided, parts) for one in found])
        if function is EXPERTS:
            node.target = Bound.of(exchanged_experts, experts=experts, **parts)
            node.kwargs = {"axis": self.axis}
        else:
            if function is split_experts:
                constants = {**constants, "experts": experts}
            node.target = Bound.of(function, **constants, **parts)
            node.kwargs = {**node.kwargs, "over": self.axis}
        change = f"{node.name}: rows to their experts and back"
        node.meta["custom"] = {**node.meta.get("custom", {}), CHANGE: change}

    def _own(self, stack: _Stack, user: fx.Node, stays: bool, parts: Mapping[str, int]) -> fx.Node:
        """What a mixture reads of a stack: its rank's experts, as they are stored if it stays."""
        last = stack.nodes[-1]
        if stays:
            for each in stack.nodes:
                each.meta["val"] = local_value(each.meta["val"], S(0), self.axis)
            stack.nodes[0].meta[OWN_AXIS] = self.axis.name
            return last
        with user.graph.inserting_before(user):
            return maker(last, self.name)(rank_rows, last, axis=self.axis, **parts)


_MIXTURES = (EXPERTS, split_experts, *_BY_EXPERTS)


def _function(node: fx.Node) -> Any:
    return unbound(node.target)[0] if node.op == "call_function" else None  # type: ignore[arg-type]


def _read(stack: fx.Node, stored: set[fx.Node]) -> _Stack:
    nodes, before = [stack], ""
    while nodes[0].target is redistribute:
        source, before, after, *_ = nodes[0].args  # type: ignore[assignment]
        if after == S(0):  # experts numbered by ep first
            raise _Declined("a stack is split by experts on the planned axis for its use only")
        nodes.insert(0, source)  # type: ignore[arg-type]
    if nodes[0] not in stored:
        raise _Declined("a stack of experts is computed, or is not stored by experts")
    if any(len(one.users) > 1 for one in nodes):
        raise _Declined("a stack of experts is read by something else too")
    return _Stack(nodes, before == S(0))
