"""Outputs and gradients of a program's serial graph and of all its ranks, in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.localize import Localize
from autoshard.passes.pipeline import rank_program
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.collectives.states import I, forward_value, gradient_value
from autoshard.verification.comparison import difference, finite, norm
from autoshard.verification.program_check import join, split


class Step(NamedTuple):
    """The first output (a loss), and the whole gradient of each parameter by its name."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def _leaf(value: Any, node: fx.Node) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(bool(node.meta["val"].requires_grad))


def placeholders(program: Program) -> list[fx.Node]:
    return [node for node in program.serial.graph.nodes if node.op == "placeholder"]


def serial_step(program: Program, values: Sequence[Any], seed: int = 0) -> Step:
    """One forward and backward of the serial graph."""
    nodes = placeholders(program)
    leaves = [_leaf(v, node) for v, node in zip(values, nodes, strict=True)]
    torch.manual_seed(seed)
    loss = program.serial(*leaves)[0]
    loss.backward()
    found = {
        program.parameters[node]: leaf.grad
        for node, leaf in zip(nodes, leaves)
        if node in program.parameters and leaf.grad is not None
    }
    return Step(loss.detach(), found)


def sharded_step(program: Program, values: Sequence[Any], seed: int = 0) -> Step:
    """The same of every rank of its axis, joined."""
    n, nodes, decisions = program.axis.size, placeholders(program), program.decisions
    state = decisions.outputs[0]
    assert state == I, state
    shards = [
        split(v.detach(), decisions.stored.get(node, I), n)
        if isinstance(v, torch.Tensor)
        else [v] * n
        for v, node in zip(values, nodes, strict=True)
    ]

    def rank(axis: Axis, local: fx.GraphModule) -> tuple[torch.Tensor, list[Any]]:
        leaves = [_leaf(shard[axis.rank], node) for shard, node in zip(shards, nodes)]
        loss = local(*leaves)[0]
        loss.backward()
        return loss.detach(), [getattr(leaf, "grad", None) for leaf in leaves]

    torch.manual_seed(seed)
    results = run_ranks(
        n, rank, prepare=lambda axis: rank_program(program.serial, (Localize(decisions),), axis)[0]
    )
    gradients = {}
    for i, node in enumerate(nodes):
        if node in program.parameters and results[0][1][i] is not None:
            where = gradient_value(decisions.stored.get(node, I))
            gradients[program.parameters[node]] = join([r[1][i] for r in results], where)
    return Step(join([r[0] for r in results], forward_value(state)), gradients)


def error(got: Step, want: Step) -> float:
    """The norm of the difference of all gradients relative to the norm of those wanted."""
    assert set(got.gradients) == set(want.gradients)
    apart = [norm(difference(got.gradients[k], grad)) for k, grad in want.gradients.items()]
    return math.hypot(*apart) / math.hypot(*(norm(finite(g)) for g in want.gradients.values()))
