"""localize: the serial graph becomes the program of one rank; state changes become explicit.

    before                                          after (tp=2)
    %x: f32[4,8]                                    %x: f32[4,8]
    %w: f32[16,8]                                   %w: f32[8,8]
    %v: f32[8,16]                                   %v: f32[8,8]
    %0: f32[4,16] = linear(%x, %w)                  %0: f32[4,8] = redistribute(%x, I -> R, tp)
    %1: f32[4,8] = linear(%0, %v)                   %1: f32[4,8] = linear(%0, %w)
                                                    %2: f32[4,8] = linear(%1, %v)
                                                    %3: f32[4,8] = redistribute(%2, P -> I, tp)

The pass obeys the decisions and decides nothing. A change is emitted once for each
(value, state) and shared by every consumer, so q, k and v pay for one gather and autograd sums
their gradients before the one reduction. Mutated inputs are written back by `copy_` at the end.

Not done: bucketing, scheduling and recomputation policy of the collectives; those are passes over
the forward and backward graphs that AOTAutograd makes of this one.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.passes.base import (
    Context,
    Pass,
    Report,
    emit,
    local_value,
    module_path,
    set_fate,
    set_recomputed,
    set_region,
    user_line,
)
from autoshard.passes.lib.layouts import as_traced, reads_strides
from autoshard.planning import (
    Decisions,
    Strategy,
    operands,
    output_state,
    producer,
    same_shape,
    value,
    value_text,
)
from autoshard.planning.rules import size_entry
from autoshard.runtime.collectives import (
    Axis,
    I,
    P,
    State,
    chunk_bounds,
    forward_value,
    redistribute,
    shard_dim,
)
from autoshard.runtime.graph_meta import (
    CHANGE,
    DIFF,
    LINE,
    MODULE,
    MUTATED,
    N_OUTPUTS,
    OUTPUT_EXTENTS,
    OUTPUT_STATES,
    READER,
    READER_LINE,
    REWRITTEN,
    VALUE,
)
from autoshard.runtime.operators import unbound

aten = torch.ops.aten


@dataclass(frozen=True)
class Localize(Pass):
    """decisions: the plan, in terms of the nodes of the graph that is rewritten.

    recompute: which collectives of a checkpointed region run again, see `Config`. functional: new
    values of inputs stay results, and nothing is written: another axis is still to be planned.
    """

    decisions: Decisions
    recompute: str = "gathers"
    functional: bool = False

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Give `gm` the graph of one rank; the graph it had, and its nodes, stay as they are.

        `gm.meta[OUTPUT_STATES]` has the state of each of the user's outputs.
        """
        rewriting = Rewriting(gm, self.decisions, ctx.axis, self.recompute, self.functional)
        for node in gm.graph.nodes:
            getattr(rewriting, f"_{node.op}")(node)
        gm.graph = rewriting.graph
        n_outputs = gm.meta[N_OUTPUTS]
        gm.meta[OUTPUT_STATES] = self.decisions.outputs[:n_outputs]
        gm.meta[OUTPUT_EXTENTS] = rewriting.output_extents[:n_outputs]
        report.hits = sum(node.target is redistribute for node in gm.graph.nodes)


class Rewriting:
    """The state of one run: the new graph, and the nodes made so far."""

    def __init__(
        self,
        gm: fx.GraphModule,
        decisions: Decisions,
        axis: Axis,
        recompute: str,
        functional: bool,
    ) -> None:
        self.decisions, self.axis, self.recompute = decisions, axis, recompute
        self.functional = functional
        self.graph = fx.Graph()
        self.local: dict[fx.Node, fx.Node] = {}
        self.converted: dict[tuple[fx.Node, State], fx.Node] = {}
        self.values: dict[Any, torch.Tensor] = {}  # repeated layers have equal ones
        self.placeholders: list[fx.Node] = []
        self.output_extents: list[int | None] = []
        self.n_outputs: int = gm.meta[N_OUTPUTS]
        self.written: Sequence[int] = gm.meta.get(MUTATED, ())
        self.chosen = decisions.recomputation
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.mutated = {placeholders[i]: None for i in self.written}

    # One method a kind of node

    def _placeholder(self, node: fx.Node) -> None:
        new = self._copied(node)
        val = value(node)
        is_tensor = isinstance(val, torch.Tensor)
        new.meta["val"] = local_value(val, self._state(node), self.axis) if is_tensor else val
        self.placeholders.append(new)
        self.local[node] = new

    def _get_attr(self, node: fx.Node) -> None:
        self.local[node] = self._copied(node)

    def _call_function(self, node: fx.Node) -> None:
        strategy = self.decisions.strategies.get(node)
        if node.target is aten.sym_size.int:
            self.local[node] = self._symbolic_size(node)
        elif strategy is None or not (operands(node) or strategy.impl):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.local.__getitem__)
            self.local[node] = self._emit(node, node.target, args, kwargs)
            self._set_whole_value(node)
            self._set_fate(self.local[node], node, self._state(node))
        else:
            new = self._operator(node, strategy)
            made = strategy.output
            self._set_fate(new, node, made if isinstance(made, str) else made[0])
            new.meta["val"] = self._local(value(node), strategy.output)
            self.local[node] = new

    def _output(self, node: fx.Node) -> None:
        results = list(node.args[0])  # type: ignore[arg-type]
        local: list[Any] = []
        # what is written back goes to where it is stored
        stored = [self._state(node) for node in self.mutated]
        states = [*self.decisions.outputs[: self.n_outputs], *stored]
        for result, state in zip(results, states, strict=True):
            if isinstance(result, fx.Node) and self._is_tensor(result):
                local.append(self._handed_out(self.convert(result, state, node), result, node))
                dim = shard_dim(state)
                extent = None if dim is None else value(result).shape[dim]
                self.output_extents.append(extent if isinstance(extent, int) else None)
            else:
                local.append(self.local[result] if isinstance(result, fx.Node) else result)
                self.output_extents.append(None)
        if self.functional:
            self.graph.output(tuple(local))
            return
        for index, new in zip(self.written, local[self.n_outputs :]):
            target = self.placeholders[index]
            if target.meta["val"].requires_grad and not target.meta.get(REWRITTEN):
                # written without autograd (a clamp under no_grad, embedding's max_norm)
                target = self._emit(node, aten.detach.default, (target,))
            self._emit(node, aten.copy_.default, (target, new))
        self.graph.output(tuple(local[: self.n_outputs]))

    # Operators

    def _operator(self, node: fx.Node, strategy: Strategy) -> fx.Node:
        states = iter(strategy.inputs)
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node):
                if self._is_tensor(leaf):
                    leaves[i] = self._read(leaf, next(states), node)
                    if strategy.impl is None and reads_strides(node):
                        leaves[i] = as_traced(leaves[i], value(leaf), self._before(node))
                else:
                    leaves[i] = self.local[leaf]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if strategy.impl is not None:
            target, constants = unbound(strategy.impl)  # torch's caches know functions only
            if "axis" in kwargs:  # it runs over an outer axis already
                kwargs = {**kwargs, "outer": kwargs["axis"]}
            inside = getattr(strategy.impl, "__name__", "its own algorithm")
            new = self._emit(
                node,
                target,
                args,
                {**kwargs, **constants, "axis": self.axis},
                {CHANGE: f"{node.name}: {inside}"},
            )
            reductions = any("reduce" in t.op for t in strategy.traffic if not t.backward)
            if strategy.traffic and not self._again(reductions):
                # what has no tag is the partitioner's to recompute, except for collectives
                set_region(new, None)
            return new
        if isinstance(strategy.output, str):
            args = self._sizes(node, args, strategy.output)
        made = self._local(value(node), strategy.output)
        if node.target is aten.reshape.default and same_shape(value(args[0]), made):
            # traced with its input's strides: its kernel may give dims of one element others
            return self._emit(node, aten.alias.default, args[:1])
        return self._emit(node, node.target, args, kwargs)

    def _read(self, source: fx.Node, state: State, user: fx.Node) -> fx.Node:
        new = self.convert(source, state, user)
        if source in self.mutated and user.meta.get(DIFF):
            # autograd may save what it reads, and the write-back changes it in place
            return self._before(source)(aten.clone.default, new)
        return new

    def _handed_out(self, new: fx.Node, result: fx.Node, output: fx.Node) -> fx.Node:
        """A gathered output with the strides that the user's code was told of it."""
        gathered = new.target is redistribute
        turned = gathered and (new.args[4] is not None or not value(result).is_contiguous())
        return as_traced(new, value(result), self._before(output)) if turned else new

    def _before(self, node: fx.Node) -> Callable[..., fx.Node]:
        """Emits an operator of its arguments, on behalf of `node`."""
        return lambda target, *args: emit(
            self.graph, node, target, args, provenance=Localize.name, custom=_origin(node)
        )

    def _sizes(self, node: fx.Node, args: tuple[Any, ...], state: State) -> tuple[Any, ...]:
        """Entry d of a view-like operator's size list, made local."""
        dim = shard_dim(state)
        entry = size_entry(node, dim) if dim is not None else None
        if entry is None:
            return args
        position, element = entry
        sizes = list(args[position])
        size = sizes[element]
        if isinstance(size, fx.Node):
            quotient = (size, self.axis.size)
            sizes[element] = self._emit(node, operator.floordiv, quotient)
            sizes[element].meta[DIFF] = False
        elif size != -1:
            sizes[element] = chunk_bounds(size, self.axis)[1]
        return (*args[:position], sizes, *args[position + 1 :])

    def _symbolic_size(self, node: fx.Node) -> fx.Node:
        source, dim = node.args[0], node.args[1]
        assert isinstance(source, fx.Node)
        size = self._emit(node, node.target, (self.local[source], dim))
        if shard_dim(self._state(source)) == dim:
            factors = (size, self.axis.size)
            size = self._emit(node, operator.mul, factors)
        return size

    # State changes

    def convert(self, source: fx.Node, want: State, user: fx.Node) -> fx.Node:
        """`source`'s local value in state `want`, through the shared copy where that is planned."""
        have, at = self._state(source), self.local[source]
        if (source, want) in self.converted:
            return self.converted[source, want]
        for state in self.decisions.route(source, want):
            if (source, state) not in self.converted:
                self.converted[source, state] = self._change(source, at, have, state, user)
            have, at = state, self.converted[source, state]
        return at

    def _change(
        self, source: fx.Node, at: fx.Node, have: State, want: State, user: fx.Node
    ) -> fx.Node:
        gradient = bool(source.meta.get(DIFF))
        if have == want or (not gradient and forward_value(have) == forward_value(want)):
            return at
        dim = shard_dim(have)
        extent = None
        if dim is not None:
            size = value(source).shape[dim]
            extent = size if isinstance(size, int) and size % self.axis.size else None
        # In a region of activation checkpointing a reduction belongs to its producer, a gather to
        # its consumer: so a region's boundary is what is small, partial sums being summed first.
        like = source if have == P or user.op == "output" else user
        new = self._emit(
            source,
            redistribute,
            (at, have, want, self.axis, extent),
            custom={
                CHANGE: f"{source.name}: {have} -> {want}",
                # what asks for the new state; the operator before it has asked for nothing
                READER: module_path(user),
                READER_LINE: user_line(user),
            },
            provenance=Localize.name,
        )
        set_region(new, like)
        gathers = dim is not None and forward_value(want) != P
        if "recompute" in new.meta and (have == P or gathers) and not self._again(have == P):
            new.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif "recompute" not in new.meta and self.decisions.gathers_again(source, have, want):
            set_recomputed(new, True)
        else:
            self._set_fate(new, source, want)
        new.meta["val"] = self._local(value(source), want)
        return new

    def _set_fate(self, new: fx.Node, source: fx.Node, state: State) -> None:
        """Name the value of the plan, and tag it as the plan says."""
        new.meta["custom"][VALUE] = value_text((source, forward_value(state)))
        if self.chosen is not None:
            set_fate(new, self.chosen)

    def _again(self, reduction: bool) -> bool:
        """Whether a collective of a checkpointed region runs again in backward."""
        return self.recompute == "all" or (self.recompute == "gathers" and not reduction)

    # Helpers

    def _local(self, val: Any, state: State | tuple[State, ...]) -> Any:
        if isinstance(val, torch.Tensor):
            key = (tuple(val.shape), val.dtype, val.device, val.requires_grad, state)
            if not all(isinstance(extent, int) for extent in val.shape):
                return local_value(val, state, self.axis)  # type: ignore[arg-type]
            if key not in self.values:
                self.values[key] = local_value(val, state, self.axis)  # type: ignore[arg-type]
            return self.values[key]
        if isinstance(val, (tuple, list)):
            return tuple(map(self._local, val, state))
        return val

    def _state(self, node: fx.Node) -> State:
        owner, index = producer(node)
        if owner not in self.decisions.strategies:
            return I
        return output_state(self.decisions.strategies[owner], index)

    @staticmethod
    def _is_tensor(node: fx.Node) -> bool:
        return isinstance(value(node), torch.Tensor)

    def _set_whole_value(self, node: fx.Node) -> None:
        """The value of a node without a strategy: one result of several, or alike on every rank."""
        owner, index = producer(node)
        if "val" in node.meta:
            whole = value(node) if index is None else value(self.local[owner])[index]
            self.local[node].meta["val"] = whole

    def _copied(self, node: fx.Node) -> fx.Node:
        """A copy of a placeholder or an attribute, with its metadata but its value."""
        new = self.graph.create_node(node.op, node.target, name=node.name)
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        new.meta["custom"] = {**node.meta.get("custom", {}), **_origin(node)}
        return new

    def _emit(
        self,
        like: fx.Node,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        custom: Mapping[str, str] | None = None,
        provenance: str = "",
    ) -> fx.Node:
        new = emit(
            self.graph,
            like,
            target,
            args,
            kwargs,
            provenance=provenance,
            value="unknown",
            custom={**_origin(like), **(custom or {})},
            name=like.name,
        )
        new.meta.update({key: like.meta[key] for key in _KEPT if key in like.meta})
        return new


def _origin(node: fx.Node) -> dict[str, str]:
    return {MODULE: module_path(node), LINE: user_line(node)}


_KEPT = (DIFF, "unbacked_bindings")
