"""localize: the serial graph becomes the program of one rank; state changes become explicit.

    before                                          after (tp=2)
    %x: f32[4,8]                                    %x: f32[4,8]
    %w: f32[16,8]                                   %w: f32[8,8]
    %v: f32[8,16]                                   %v: f32[8,8]
    %0: f32[4,16] = linear(%x, %w)                  %0: f32[4,8] = change(%x, R -> V, tp)
    %1: f32[4,8] = linear(%0, %v)                   %1: f32[4,8] = linear(%0, %w)
                                                    %2: f32[4,8] = linear(%1, %v)
                                                    %3: f32[4,8] = change(%2, P -> R, tp)

The pass obeys the decisions and decides nothing. A change is emitted once for each
(value, state) and shared by every consumer, so q, k and v pay for one gather and autograd sums
their gradients before the one reduction. Mutated inputs are written back by `copy_` at the end.

Not done: bucketing, scheduling and recomputation policy of the collectives; those are passes over
the forward and backward graphs that AOTAutograd makes of this one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.passes.base import module_path, user_line
from autoshard.planning import Decisions, Strategy, operands, output_state, producer, value
from autoshard.planning.rules import size_entry
from autoshard.runtime.collectives import (
    Axis,
    P,
    R,
    State,
    change,
    chunk_bounds,
    forward_value,
    shard_dim,
)
from autoshard.runtime.operators import unbound

aten = torch.ops.aten


def local_value(val: torch.Tensor, state: State, axis: Axis) -> torch.Tensor:
    """A fake of the local shape of `val` in `state`, under the same fake mode."""
    dim = shard_dim(state)
    if dim is None:
        return val
    extent = val.shape[dim]
    if isinstance(extent, int):
        length: int | torch.SymInt = chunk_bounds(extent, axis)[1]
    else:
        length = extent // axis.size
    shape = [*val.shape[:dim], length, *val.shape[dim + 1 :]]
    local = val.detach().new_empty(shape)
    return local.requires_grad_(val.requires_grad)


class Localize:
    """Rewrites one captured graph to local shapes; `run` returns a new GraphModule.

    recompute: which collectives of a checkpointed region run again, see `Config`.
    """

    name = "localize"

    def __init__(
        self, gm: fx.GraphModule, decisions: Decisions, axis: Axis, recompute: str = "gathers"
    ) -> None:
        self.gm, self.decisions, self.axis = gm, decisions, axis
        self.recompute = recompute
        self.graph = fx.Graph()
        self.local: dict[fx.Node, fx.Node] = {}
        self.converted: dict[tuple[fx.Node, State], fx.Node] = {}
        self.values: dict[Any, torch.Tensor] = {}  # repeated layers have equal ones
        self.placeholders: list[fx.Node] = []
        self.mutated: set[fx.Node] = set()

    def run(self) -> fx.GraphModule:
        """The local graph; meta["output_states"] has the state of each of the user's outputs."""
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.mutated = {placeholders[i] for i in self.gm.meta.get("mutated", ())}
        for node in self.gm.graph.nodes:
            getattr(self, f"_{node.op}")(node)
        local = fx.GraphModule(self.gm, self.graph)
        n_outputs = self.gm.meta["n_outputs"]
        local.meta["output_states"] = self.decisions.outputs[:n_outputs]
        local.meta["output_extents"] = self.output_extents[:n_outputs]
        return local

    # One method a kind of node

    def _placeholder(self, node: fx.Node) -> None:
        new = self._emit(node, "placeholder", node.target, (), {})
        val = value(node)
        is_tensor = isinstance(val, torch.Tensor)
        new.meta["val"] = local_value(val, self._state(node), self.axis) if is_tensor else val
        self.placeholders.append(new)
        self.local[node] = new

    def _get_attr(self, node: fx.Node) -> None:
        self.local[node] = self._emit(node, "get_attr", node.target, (), {})

    def _call_function(self, node: fx.Node) -> None:
        strategy = self.decisions.strategies.get(node)
        if node.target is aten.sym_size.int:
            self.local[node] = self._symbolic_size(node)
        elif strategy is None or not (operands(node) or strategy.impl):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.local.__getitem__)
            self.local[node] = self._emit(node, "call_function", node.target, args, kwargs)
        else:
            new = self._operator(node, strategy)
            new.meta["val"] = self._local(value(node), strategy.output)
            self.local[node] = new

    def _output(self, node: fx.Node) -> None:
        n_outputs = self.gm.meta["n_outputs"]
        results = list(node.args[0])  # type: ignore[arg-type]
        local: list[Any] = []
        self.output_extents: list[Any] = []
        for result, state in zip(results, self.decisions.outputs):
            if isinstance(result, fx.Node) and self._is_tensor(result):
                local.append(self.convert(result, state, node))
                dim = shard_dim(state)
                extent = None if dim is None else value(result).shape[dim]
                self.output_extents.append(extent if isinstance(extent, int) else None)
            else:
                local.append(self.local[result] if isinstance(result, fx.Node) else result)
                self.output_extents.append(None)
        for index, new in zip(self.gm.meta.get("mutated", ()), local[n_outputs:]):
            target = self.placeholders[index]
            if target.meta["val"].requires_grad:
                # a leaf written without autograd (a clamp under no_grad, embedding's max_norm)
                target = self._emit(node, "call_function", aten.detach.default, (target,))
            self._emit(node, "call_function", aten.copy_.default, (target, new))
        self.graph.output(tuple(local[:n_outputs]))

    # Operators

    def _operator(self, node: fx.Node, strategy: Strategy) -> fx.Node:
        states = iter(strategy.inputs)
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node):
                if self._is_tensor(leaf):
                    leaves[i] = self._read(leaf, next(states), node)
                else:
                    leaves[i] = self.local[leaf]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if strategy.impl is not None:
            target, constants = unbound(strategy.impl)  # torch's caches know functions only
            new = self._emit(
                node, "call_function", target, args, {**kwargs, **constants, "axis": self.axis}
            )
            inside = getattr(strategy.impl, "__name__", "its own algorithm")
            new.meta["custom"]["autoshard_change"] = f"{node.name}: {inside}"
            reductions = any("reduce" in t.op for t in strategy.traffic if not t.backward)
            if strategy.traffic and not self._again(reductions):
                # what has no tag is the partitioner's to recompute, except for collectives
                for key in ("recompute", "ac_graph_id"):
                    new.meta.pop(key, None)
            return new
        if isinstance(strategy.output, str):
            args = self._sizes(node, args, strategy.output)
        return self._emit(node, "call_function", node.target, args, kwargs)

    def _read(self, source: fx.Node, state: State, user: fx.Node) -> fx.Node:
        new = self.convert(source, state, user)
        if source in self.mutated and user.meta.get("diff"):
            # autograd may save what it reads, and the write-back changes it in place
            return self._emit(source, "call_function", aten.clone.default, (new,))
        return new

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
            sizes[element] = self._emit(node, "call_function", operator.floordiv, quotient)
        elif size != -1:
            sizes[element] = chunk_bounds(size, self.axis)[1]
        return (*args[:position], sizes, *args[position + 1 :])

    def _symbolic_size(self, node: fx.Node) -> fx.Node:
        source, dim = node.args[0], node.args[1]
        assert isinstance(source, fx.Node)
        size = self._emit(node, "call_function", node.target, (self.local[source], dim))
        if shard_dim(self._state(source)) == dim:
            factors = (size, self.axis.size)
            size = self._emit(node, "call_function", operator.mul, factors)
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
        gradient = bool(source.meta.get("diff"))
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
        new = self._emit(source, "call_function", change, (at, have, want, self.axis, extent))
        for key in ("recompute", "ac_graph_id"):
            new.meta.pop(key, None)
            if key in like.meta:
                new.meta[key] = like.meta[key]
        gathers = dim is not None and forward_value(want) != P
        if "recompute" in new.meta and (have == P or gathers) and not self._again(have == P):
            new.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        new.meta["val"] = self._local(value(source), want)
        new.meta["custom"]["autoshard_change"] = f"{source.name}: {have} -> {want}"
        # what asks for the new state; the operator before it has asked for nothing
        new.meta["custom"]["autoshard_reader"] = module_path(user)
        new.meta["custom"]["autoshard_reader_line"] = user_line(user)
        return new

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
            return R
        return output_state(self.decisions.strategies[owner], index)

    @staticmethod
    def _is_tensor(node: fx.Node) -> bool:
        return isinstance(value(node), torch.Tensor)

    def _emit(
        self,
        like: fx.Node,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        new = self.graph.create_node(op, target, args, kwargs or {}, name=like.name)
        new.meta = {k: v for k, v in like.meta.items() if k != "val"}
        # "custom" is what AOTAutograd carries into the forward and the backward graph
        new.meta["custom"] = {
            **like.meta.get("custom", {}),
            "autoshard_module": module_path(like),
            "autoshard_line": user_line(like),
        }
        return new
