"""split_halves: a part of a rank's graph runs on two halves of its rows.

    before (tp=2)                                   after
    %x: f32[4,8]                                    %x: f32[4,8]
    %0: f32[4,4] = linear(%x, %w)                   %0, %1: f32[2,8] = split(%x, 2)
    %1: f32[4,8] = linear(%0, %v)                   %2: f32[2,4] = linear(%0, %w)
    %2: f32[4,8] = redistribute(%1, P -> I, tp)     %3: f32[2,4] = linear(%1, %w)
    %3: f32[4,8] = relu(%2)                         %4: f32[2,8] = linear(%2, %v)
                                                    %5: f32[2,8] = linear(%3, %v)
                                                    %6: f32[2,8] = redistribute(%4, P -> I, tp)
                                                    %7: f32[2,8] = redistribute(%5, P -> I, tp)
                                                    %8: f32[4,8] = cat([%6, %7])
                                                    %9: f32[4,8] = relu(%8)

The collectives of one half then have the other half's products to hide behind, forward and backward
(the idea of G. Wang et al., "Domino: eliminating communication in LLM training via generic tensor
slicing and overlapping", 2024); `interleave_halves` puts the graphs that autograd makes of this one
in that order. Weights are shared: a weight's gradient is the sum of two products.

Which part that may be follows from the sharding rules (planning/halves/region.py), and whether it
is worth it from the prices. Random numbers are those of the element's place in the whole tensor. A
node says by `HALF` which half it is of.

Not done: more than two parts; halves of unequal size; graphs without gradients.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.passes.base import Context, Report, emit, local_value
from autoshard.planning import Strategy, operands, value
from autoshard.planning.cost import Cluster, Link
from autoshard.planning.halves import (
    HALVES,
    Found,
    Halves,
    Halving,
    find_halves,
    halves_seconds,
    leaving,
)
from autoshard.planning.rules import size_entry
from autoshard.runtime.collectives import Axis, State, shard_dim
from autoshard.runtime.graph_meta import HALF, SPLIT_HALVES
from autoshard.runtime.operators import unbound

aten = torch.ops.aten
_AXES = tuple(Axis("halves", HALVES, half, "halves:") for half in range(HALVES))


@dataclass(frozen=True)
class SplitHalves:
    """parameters: positions of the placeholders of parameters. halving: when it is worth it, on the
    machine `cluster`, where `link` is that of the planned axis."""

    name: ClassVar[str] = "split_halves"
    optional: ClassVar[bool] = True
    parameters: frozenset[int]
    halving: Halving
    cluster: Cluster
    link: Link

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite in place. `gm.meta[SPLIT_HALVES]` says what was found, and what became of it."""
        report = Report(self.name)
        halves = find_halves(gm.graph, self.parameters, ctx.axis)
        seconds, loses, count = None, "", len(halves.collectives)
        if count:
            seconds = halves_seconds(halves, ctx.axis, self.cluster, self.link)
            loses = self.halving.loses(seconds)
        if count and not loses:
            report.hits = count
            _Doubling(gm.graph, halves, self.name).run()
        reason = loses or halves.reason
        if reason:
            report.skip(gm.graph.output_node(), reason)
        gm.meta[SPLIT_HALVES] = Found(report.hits, seconds, reason)
        return report


class _Doubling:
    def __init__(self, graph: fx.Graph, halves: Halves, provenance: str) -> None:
        self.graph, self.halves, self.provenance = graph, halves, provenance
        self.made: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.cut: dict[tuple[fx.Node, int], tuple[fx.Node, ...]] = {}

    def run(self) -> None:
        nodes = list(self.halves.strategies)
        ends = set(leaving(nodes))
        for node in nodes:
            with self.graph.inserting_before(node):
                strategy = self.halves.strategies[node]
                self.made[node] = tuple(self._half(node, strategy, axis) for axis in _AXES)
                if node in ends:
                    self._join(node)
        for node in reversed(nodes):
            self.graph.erase_node(node)

    def _half(self, node: fx.Node, strategy: Strategy | None, axis: Axis) -> fx.Node:
        if strategy is None:  # one result of several
            of, index = node.args
            new = self._emit(node, operator.getitem, (self.made[of][axis.rank], index), {}, axis)  # type: ignore[index]
            new.meta["val"] = local_value(value(node), self.halves.state(node), axis)
            return new
        states = iter(strategy.inputs)
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        tensors = set(operands(node))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node) and leaf in tensors:
                leaves[i] = self._read(leaf, next(states), node)[axis.rank]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        target: Any = node.target
        if strategy.impl is not None:
            target, constants = unbound(strategy.impl)
            if "axis" in kwargs:
                kwargs = {**kwargs, "outer": kwargs["axis"]}
            kwargs = {**kwargs, **constants, "axis": axis}
        elif isinstance(strategy.output, str):
            args = _sizes(node, args, strategy.output)
        new = self._emit(node, target, args, kwargs, axis)
        made, output = value(node), strategy.output
        if isinstance(made, (tuple, list)):
            new.meta["val"] = tuple(local_value(v, s, axis) for v, s in zip(made, output))
        else:
            assert isinstance(output, str)
            new.meta["val"] = local_value(made, output, axis)
        return new

    def _read(self, source: fx.Node, state: State, user: fx.Node) -> tuple[fx.Node, ...]:
        """Both halves of an operand; of a value that is read whole, it itself."""
        if source in self.made:
            return self.made[source]
        dim = shard_dim(state)
        if dim is None:
            return (source,) * HALVES
        if (source, dim) not in self.cut:
            size, at = value(source).shape[dim] // HALVES, source
            new = emit(
                self.graph, user, aten.split.Tensor, (at, size, dim), provenance=self.provenance
            )
            self.cut[source, dim] = tuple(self._piece(user, new, dim, axis) for axis in _AXES)
        return self.cut[source, dim]

    def _piece(self, user: fx.Node, pieces: fx.Node, dim: int, axis: Axis) -> fx.Node:
        half = {HALF: axis.rank}
        args = (pieces, axis.rank)
        new = emit(
            self.graph, user, operator.getitem, args, provenance=self.provenance, custom=half
        )
        if dim:  # so that views of it are views
            kept = {"memory_format": torch.contiguous_format}
            new = emit(
                self.graph, user, aten.clone.default, (new,), kept, provenance=self.provenance
            )
        return new

    def _join(self, node: fx.Node) -> None:
        """Have those outside read both halves side by side."""
        dim = shard_dim(self.halves.state(node))
        args = (list(self.made[node]), dim)
        whole = emit(
            self.graph, node, aten.cat.default, args, provenance=self.provenance, value=node
        )
        for user in list(node.users):
            if user not in self.halves.strategies:
                user.replace_input_with(node, whole)

    def _emit(
        self, node: fx.Node, target: Any, args: Any, kwargs: dict[str, Any], axis: Axis
    ) -> fx.Node:
        new = emit(self.graph, node, target, args, kwargs, provenance="", value="unknown")
        custom = {**node.meta.get("custom", {}), HALF: axis.rank}
        new.meta = {**node.meta, "custom": custom}
        return new


def _sizes(node: fx.Node, args: tuple[Any, ...], state: State) -> tuple[Any, ...]:
    """The entry of a view-like operator's list of sizes that is half as large."""
    dim = shard_dim(state)
    entry = None if dim is None else size_entry(node, dim)
    if entry is None:
        return args
    position, element = entry
    sizes = list(args[position])
    if sizes[element] != -1:
        sizes[element] //= HALVES
    return (*args[:position], sizes, *args[position + 1 :])
