"""The operators of a graph that are worth a line or a vertex."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.compiling import Built
from autoshard.planning import cost, is_trained, operands, strategy_text, value
from autoshard.runtime.graph_meta import DIFF


def planned_operators(built: Built) -> dict[fx.Node, str]:
    """The operators that multiply matrices, read a parameter or communicate, with their
    strategies as text."""
    found = {}
    flows = carries_data(built)
    for node in built.serial.graph.nodes:
        strategy = built.decisions.strategies.get(node)
        if strategy is None or not flows(node):
            continue
        reads = any(source in built.parameters for source in operands(node))
        if reads or strategy.traffic or cost.node_flops(node):
            found[node] = strategy_text(strategy)
    return found


def carries_data(built: Built) -> Callable[[fx.Node], bool]:
    """Which nodes carry what the model computes: those with a gradient, so that masks and
    positions are left out; in a graph without gradients all of floating point."""
    if is_trained(built.serial):
        return lambda node: node.op == "call_function" and bool(node.meta.get(DIFF))
    return lambda node: (
        node.op == "call_function"
        and any(
            isinstance(val, torch.Tensor) and val.is_floating_point()
            for val in pytree.tree_leaves(value(node))
        )
    )
