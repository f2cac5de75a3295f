"""A rank's graph under spmd_types, torch's checker of what is partial, forward and backward.

Its letters are ours: I (invariant), R (replicated, the gradient partial) and P; its V (varying) is
our S(d): it does not look at the dim. So where a contraction of two varying
operands is planned as a partial sum, the plan is believed (`SUMS`); from there on the checker says
what may be done with it, and which replicated operand must collect a partial gradient.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import spmd_types as spmd
import spmd_types.checker
import torch
from spmd_types import MeshAxis, SpmdTypeError, _checker, rules
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.planning.strategy import Strategy
from autoshard.program import Program
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.collectives.states import I, P, R, State
from autoshard.runtime.operators.bound import unbound
from autoshard.runtime.operators.experts import EXPERTS, exchanged_experts
from autoshard.runtime.parameters.data_unsharding import unshard

aten = torch.ops.aten

#: The communication that takes one type to another; `convert`, which sends nothing, for the rest.
STEPS = {
    (spmd.P, spmd.I): rules.all_reduce,
    (spmd.P, spmd.R): rules.all_reduce,
    (spmd.P, spmd.V): rules.reduce_scatter,
    (spmd.V, spmd.I): rules.all_gather,
    (spmd.V, spmd.R): rules.all_gather,
    (spmd.V, spmd.V): rules.all_to_all,
}

#: Operators that may make a partial sum of varying operands.
SUMS = {"linear", "conv1d", "conv2d", "matmul", "mm", "bmm", "grouped_mm_fallback", "sum"}

#: Of these the bias is added after the sum, so that the checker sees which of the two is partial.
WITH_BIAS = {"linear", "conv1d", "conv2d"}


def theirs(state: State) -> Any:
    """The checker's type of one of our states."""
    return {I: spmd.I, R: spmd.R, P: spmd.P}.get(state, spmd.V)


def check_types(program: Program) -> Counter[str]:
    """Run the rank's forward graph on fakes under the checker; raises its SpmdTypeError.

    Each value's type must be the plan's state, so must each output's. Returns how often the plan
    was believed: "<operator>: partial sum" for `SUMS`, and the names of implementations that have
    collectives of their own.
    """
    axes: dict[str, MeshAxis] = {}
    stride = 1
    for axis in reversed(program.mesh.axes):
        axes[axis.name] = MeshAxis.of(axis.size, stride)
        stride *= axis.size
    graph = program.graph_module.graph
    fakes = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, torch.Tensor))
    known = dict(_known_linear(program.graph_module))
    # rows that travel are as many as are counted: symbols of this run, which nothing defines after
    env = mode.shape_env
    sizes = contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with mode, sizes, mock.patch.dict(_checker._OP_REGISTRY, known):
        fresh = [_fresh(fake) for fake in fakes]
        with spmd.set_current_mesh(axes), spmd.checker.typecheck():
            typed = _Typed(program, axes)
            outputs = typed.run(*fresh)
            for output, state in zip(outputs, program.graph_module.meta["output_states"]):
                if isinstance(output, torch.Tensor):
                    typed.expect(output, state, "an output")
    return typed.believed


def _fresh(fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return fake
    return torch.empty_like(fake).requires_grad_(fake.requires_grad)


def _known_linear(gm: fx.GraphModule) -> Iterator[tuple[Any, Any]]:
    """What the checker knows of torch.add, under the name aten.add.Tensor, and so on."""
    for target in {n.target for n in gm.graph.nodes} | {aten.add.Tensor}:
        if isinstance(target, torch._ops.OpOverload):
            name = _name(target)
            for owner in (torch.Tensor, torch):
                if getattr(owner, name, None) in _checker._OP_REGISTRY:
                    yield target, _checker._OP_REGISTRY[getattr(owner, name)]


def _name(target: Any) -> str:
    """An operator's name without library and overload."""
    schema = getattr(target, "_schema", None)
    return "" if schema is None else schema.name.split("::")[1]


#: What may stand in a rank's graph for an operator of the serial one.
_OF_RANKS = {
    EXPERTS: (exchanged_experts,),
    torch.ops.aten.reshape.default: (torch.ops.aten.alias.default,),
}


def _stem(node: fx.Node) -> str:
    return re.sub(r"(_\d+)+$", "", node.name)


class _Typed(fx.Interpreter):
    """Runs each operator of the local graph and compares its inferred type with the plan's."""

    def __init__(self, program: Program, axes: Mapping[str, MeshAxis]) -> None:
        super().__init__(program.graph_module, garbage_collect_values=False)
        self.program, self.axes, self.tp = program, axes, axes.get("tp")
        self.believed: Counter[str] = Counter()
        self.planned = dict(self._planned())

    def _planned(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(local node, the serial one that it is): both graphs have one order."""
        strategies = self.program.decisions.strategies
        local = iter(self.program.graph_module.graph.nodes)
        placeholders = iter(self.program.graph_module.graph.find_nodes(op="placeholder"))
        for node in self.program.serial.graph.nodes:
            if node.op == "placeholder":
                yield next(placeholders), node
            elif node.op == "call_function":
                strategy = strategies.get(node)
                impl = None if strategy is None else strategy.impl
                target = node.target if impl is None else unbound(impl)[0]
                targets = (target, *_OF_RANKS.get(target, ()))
                same = (
                    n for n in local if unbound(n.target)[0] in targets and _stem(n) == _stem(node)
                )
                yield next(same), node

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A parameter as it is stored; of the batch, each data-parallel rank has its own."""
        found = super().placeholder(target, args, kwargs)
        node = self.planned[self.node]
        if not isinstance(found, torch.Tensor):
            return found
        types = {}
        for name, axis in self.axes.items():
            if axis is self.tp:
                types[axis] = theirs(self.program.decisions.state(node))
            elif node in self.program.data:
                types[axis] = theirs(self.program.data[node].get(name, I))
            else:
                types[axis] = spmd.I if node.meta.get("buffer") else spmd.V
        return spmd.assert_type(found, types)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operator, its type inferred, then compared with the plan's state."""
        tensors = [a for a in pytree.arg_tree_leaves(*args, **kwargs) if _is_tensor(a)]
        if target is redistribute:
            return self._redistributed(target, args, args[3].name, args[1], args[2])
        if target is unshard:
            if "outer" in kwargs:
                wide = args[4]._replace(gathered=True)
                state, axis, extent = kwargs["outer"]
                whole = self._redistributed(
                    target, (args[0], state, axis, extent, wide), axis.name, state, R
                )
                args = (whole, *args[1:])
            if len(args) > 4 and not args[4].gathered:  # experts, of which a rank uses its own
                with spmd.checker.no_typecheck():
                    made = target(*args)
                return spmd.assert_type(made, spmd.get_local_type(args[0]))
            return self._redistributed(target, args, args[2].name, args[1], R)
        serial = self.planned.get(self.node)
        strategy = self.program.decisions.strategies.get(serial) if serial is not None else None
        if not tensors:
            made = target(*args, **kwargs)
            alike = dict.fromkeys(self.axes.values(), spmd.I)  # a constant, the same on each rank
            return spmd.assert_type(made, alike) if _is_tensor(made) else made
        own = unbound(target)[0] in (EXPERTS, exchanged_experts)
        if strategy is not None and (strategy.impl is not None or own):
            return self._own_collectives(target, args, kwargs, tensors, strategy)
        name = _name(target)
        if name in WITH_BIAS and len(args) > 2 and args[2] is not None:
            product = self._planned_type(target(*args[:2], None, *args[3:]), strategy, name)
            bias = args[2]
            if name != "linear":
                bias = bias.reshape(-1, *[1] * (product.dim() - 2))
            return self._planned_type(aten.add.Tensor(product, bias), strategy, name)
        return self._planned_type(target(*args, **kwargs), strategy, name)

    def _redistributed(self, target: Any, args: Any, axis: str, src: State, dst: State) -> Any:
        with spmd.checker.no_typecheck():
            made = target(*args)
        step = STEPS.get((theirs(src), theirs(dst)), rules.convert)
        typed = step(args[0], self.axes[axis], src=theirs(src), dst=theirs(dst))
        return made if made is args[0] else spmd.assert_type(made, spmd.get_local_type(typed))

    def _own_collectives(
        self, target: Any, args: Any, kwargs: Any, tensors: list[Any], strategy: Strategy
    ) -> Any:
        """An implementation of ours that communicates inside, and shares of experts, whose last
        bias is a partial sum as their products are: its types are its strategy's."""
        self.believed[unbound(target)[0].__name__] += 1
        for tensor, state in zip(tensors, strategy.inputs, strict=True):
            self.expect(tensor, state, "an operand")
        with spmd.checker.no_typecheck():
            made = target(*args, **kwargs)
        types = [spmd.get_local_type(tensor) for tensor in tensors]
        other = {
            axis: next((t[axis] for t in types if t[axis] is spmd.V), types[0][axis])
            for axis in self.axes.values()
        }
        for value, state in _with_states(made, strategy):
            tp = {} if self.tp is None else {self.tp: theirs(state)}
            spmd.assert_type(value, {**other, **tp})
        return made

    def _planned_type(self, made: Any, strategy: Strategy | None, name: str) -> Any:
        if strategy is not None and self.tp is not None:
            for value, state in _with_states(made, strategy):
                inferred = spmd.get_axis_local_type(value, self.tp)
                if state == P and inferred is spmd.V and name in SUMS:
                    self.believed[f"{name}: partial sum"] += 1
                    spmd.mutate_type(value, self.tp, src=spmd.V, dst=spmd.P)
                self.expect(value, state, "the result")
        return made

    def expect(self, tensor: torch.Tensor, state: State, what: str) -> None:
        """The type on tp is the state's; I and R are one where no gradient flows."""
        if self.tp is None:
            return
        found, want = spmd.get_axis_local_type(tensor, self.tp), theirs(state)
        if found is not want and (tensor.requires_grad or {found, want} != {spmd.R, spmd.I}):
            raise SpmdTypeError(f"{self.node}: {what} is planned {state}, inferred {found}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _with_states(made: Any, strategy: Strategy) -> Iterator[tuple[torch.Tensor, State]]:
    values = pytree.tree_leaves(made)
    states = strategy.output if isinstance(strategy.output, tuple) else (strategy.output,)
    for value, state in zip(values, states, strict=True):
        if _is_tensor(value):
            yield value, state
