"""A compiled program as one thread at a time runs it, forward and backward, with errors that name
the rank that is missing from a collective."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.planning.cost import COLLECTIVES
from autoshard.runtime import compat
from autoshard.runtime.agreement import (
    Call,
    CollectiveRegion,
    line_of,
    reducing,
    will_reduce,
)
from autoshard.runtime.collectives import (
    DATA_AXES,
    Axis,
    State,
    forward_value,
    redistribute,
    shard_dim,
    step,
)
from autoshard.runtime.errors import message
from autoshard.runtime.operators import rows_travel
from autoshard.runtime.parameters import ACCUMULATE, unshard


def watched(
    compiled: Callable[..., Any], axes: Sequence[Axis], local: fx.GraphModule
) -> Callable[..., Any]:
    """`compiled`, which `compile_local` has made of the graph `local`, in regions of collectives.

    The backward of AOTAutograd's graphs is one too, from the first call that records it on. With
    inner="eager" there is none: autograd runs the operators one by one.
    """
    gathered, reduced = _moved(local)
    name = "the {} of a compiled graph".format
    lines = {node.name: line for node in local.graph.nodes if (line := line_of(node)) is not None}
    forward = CollectiveRegion(name("forward"), axes, _met(local, axes), gathered, lines)
    backward = CollectiveRegion(name("backward"), axes)
    calls = [
        (axis, Call(name("backward"), reduced[axis.name]))
        for axis in axes
        if reduced.get(axis.name)
    ]
    refusal = message(
        "a second derivative through a compiled graph, which AOTAutograd does not compile "
        "(create_graph=True, a penalty on a gradient, a product with the Hessian)",
        remedy="Compute the loss whose gradient is differentiated with the model that was given "
        "to torch.compile, in eager code, or compile with options={'inner': 'eager'}.",
    )
    armed = False

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with backward, reducing(axis for axis, _ in calls):
            yield

    def run(*values: Any) -> Any:
        nonlocal armed
        with forward:
            outputs = compiled(*values)
        node = compat.compiled_node(outputs) if torch.is_grad_enabled() else None
        if node is not None:
            if not armed:
                compat.around_backward(node, around, refusal)
                armed = True
            for axis, call in calls:
                will_reduce(node, [axis], call, axis.name in gathered)
        return outputs

    return run


def _moved(local: fx.GraphModule) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By data-parallel axis, the parameters that are gathered in forward, and those whose gradients
    are reduced in backward: names that Dynamo gives the graph's inputs, alike on ranks that run the
    same code, whatever the shapes of their batches."""
    gathered: dict[str, list[str]] = defaultdict(list)
    reduced: dict[str, list[str]] = defaultdict(list)
    for node in local.graph.find_nodes(op="call_function", target=unshard):
        source = node
        while source.op != "placeholder" and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        for state, axis in _unsharded(node):
            if axis.name not in DATA_AXES:
                continue
            if shard_dim(state) is not None:
                gathered[axis.name].append(source.name)
            value = source.meta.get("val")
            if ACCUMULATE not in node.args and getattr(value, "requires_grad", False):
                reduced[axis.name].append(source.name)
    return gathered, reduced


def _unsharded(node: fx.Node) -> list[tuple[State, Axis]]:
    """The state changes of an `unshard`: two, where two axes split the parameter."""
    outer = [node.kwargs["outer"][:2]] if "outer" in node.kwargs else []  # type: ignore[index]
    return [node.args[1:3], *outer]  # type: ignore[list-item]


def _met(local: fx.GraphModule, axes: Sequence[Axis]) -> list[Axis]:
    """The axes on which the forward of a rank's graph has a collective.

    Read off the graph that AOTAutograd is given: where torch finds its compiled form in a cache on
    disk, we see no other. That is the forward's part only.
    """
    groups = set()
    for node in local.graph.nodes:
        if node.target is redistribute:
            _, src, dst, axis = node.args[:4]
            if step(forward_value(src), forward_value(dst)) in COLLECTIVES:
                groups.add(axis.group)
        elif node.target is unshard:
            over = _unsharded(node)
            groups |= {axis.group for state, axis in over if shard_dim(state) is not None}
        elif travel := rows_travel(node):
            groups |= {axis.group for axis in travel}
    return [axis for axis in axes if axis.group in groups]
