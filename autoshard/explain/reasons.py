"""Why a parameter is where it is, and what stayed whole: for `explain` and for `strict`."""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.compiling import Built
from autoshard.passes import module_path, user_line
from autoshard.planning import operands, value
from autoshard.planning.rules import rules_for
from autoshard.runtime.collectives import I, R, State, shard_dim
from autoshard.runtime.errors import PlanError
from autoshard.runtime.graph_meta import DIFF


@dataclass(frozen=True)
class Whole:
    """A parameter of two dims or more, or an operator, that every rank keeps or runs whole.

    name: the parameter's, or the operator's. where: the user's line ("" where it is not known).
    """

    kind: str
    name: str
    reason: str
    module: str
    where: str


def reason(built: Built, node: fx.Node) -> str:
    """Why a parameter is where it is, in one clause."""
    decisions = built.decisions
    state = decisions.stored[node]
    uses: list[tuple[fx.Node, State]] = []
    for user in node.users:
        strategy = decisions.strategies.get(user)
        if strategy is not None:
            states = [s for o, s in zip(operands(user), strategy.inputs) if o is node]
            uses.append((user, states[0] if states else I))
    if not uses:
        return "unused in this graph"
    user, use = uses[0]
    where = operator_name(user)
    if state == I:
        declined = decisions.declined.get(user)
        if declined and max(value(node).shape, default=0) >= built.axis.size:
            return f"{where}: {declined[0]}"
        if use == R:
            return f"{where} uses it whole; the ranks' gradients are summed"
        return f"{where} runs whole; splitting saves less than its collectives cost"
    if use == state:
        return f"{where} runs on the shard"
    if shard_dim(use) is None:
        return f"{where} needs it whole: gathered before use"
    return f"{where} uses {use}: moved before use"


def operator_name(node: fx.Node) -> str:
    """`linear` for aten.linear.default."""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def whole(built: Built) -> list[Whole]:
    """Parameters (of two dims or more) and operators without a rule, in the order of the graph.

    An operator that only reads masks and positions is not worth a rule and is left out.
    """
    if built.axis.size == 1:
        return []
    found = []
    for node, name in built.parameters.items():
        if value(node).dim() > 1 and built.decisions.stored[node] == I:
            user = next(iter(node.users), node)
            found.append(
                Whole("parameter", name, reason(built, node), module_path(user), user_line(user))
            )
    for node in built.whole.graph.nodes:  # not those that laying out cp has put there
        if node.op == "call_function" and node.meta.get(DIFF) and operands(node):
            why = _no_rule(node)
            if why:
                found.append(
                    Whole("operator", str(node.target), why, module_path(node), user_line(node))
                )
    return found


def _no_rule(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return ""
    if not isinstance(node.target, torch._ops.OpOverload):
        return "it is no single operator, so no rule describes it"
    if rules_for(node.target) is None:
        return "it has no sharding rule (see autoshard.sharding_rule)"
    return ""


def check_strict(built: Built) -> None:
    """Raise PlanError where something stayed whole that the caller did not ask to keep whole."""
    found = whole(built)
    if not found:
        return
    lines = [
        f"  {w.kind} {w.name}{f' ({w.where})' if w.where else ''}: {w.reason}"
        for w in dict.fromkeys(found)
    ]
    raise PlanError(
        f"strict: {len(lines)} not sharded on {built.axis.name}={built.axis.size}:\n"
        + "\n".join(lines)
        + "\nGive the operator a rule with autoshard.sharding_rule, choose sizes that the axis "
        "splits, or drop options['strict']: what stays whole is slower, never wrong."
    )
