"""A plan file and a graph: what the file says is left to choose from, what was chosen joins it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from autoshard.planning.asked.request import Request
from autoshard.planning.decisions import Decisions
from autoshard.planning.head_tail import in_plain_order
from autoshard.planning.operators import target_name
from autoshard.planning.plan import Plan, strategy_text, without_ep
from autoshard.planning.problem import Problem
from autoshard.planning.strategy import value
from autoshard.runtime.errors import PlanError


def fingerprint(gm: fx.GraphModule) -> str:
    """Names, operators and shapes of a graph: equal on every rank that captured the same one."""
    text = hashlib.sha256()
    for node in gm.graph.nodes:
        val = value(node)
        shape = tuple(str(e) for e in val.shape) if isinstance(val, torch.Tensor) else ()
        text.update(f"{node.op} {node.name} {target_name(node)} {shape}\n".encode())
    return text.hexdigest()[:16]


def constrain(gm: fx.GraphModule, problem: Problem, plan: Plan) -> None:
    """Leave only what a loaded plan names for this graph."""
    graph = plan.graphs.get(fingerprint(gm))
    if graph is None:
        return
    by_name = {node.name: node for node in gm.graph.nodes}
    for name, text in graph.nodes.items():
        node = by_name.get(name)
        domain = problem.domains.get(node, []) if node else []
        texts, text = [strategy_text(s) for s in domain], in_plain_order(text)
        if not any(one.on_ep for one in domain):  # of another mesh
            text = without_ep(text)
        elif text == without_ep(text):  # which leaves that open
            texts = [without_ep(one) for one in texts]
        if text not in texts:
            raise PlanError(
                f"the plan runs node {name!r} as {text!r}, which is not possible there. "
                f"Possible: {texts or 'nothing (no such node)'}. Correct the line, or delete it."
            )
        assert node is not None
        keep_only(problem, problem.variables[node], [t == text for t in texts])
    for name, state in graph.copies.items():
        node = by_name.get(name)
        states = problem.copy_domains.get(node, []) if node else []
        state = in_plain_order(state)
        if state not in states:
            raise PlanError(
                f"the plan keeps the shared copy of {name!r} in {state!r}; possible: {states}"
            )
        assert node is not None
        keep_only(problem, problem.copies[node], [s == state for s in states])


def keep_only(problem: Problem, variable: int, allowed: list[bool]) -> None:
    """Leave only the allowed values of a variable."""
    problem.graph.add((variable,), np.where(np.array(allowed), 0.0, np.inf))


def with_graph(
    plan: Plan | None, decisions: Decisions, request: Request, gm: fx.GraphModule, n: int
) -> Plan:
    """`plan` with this graph's decisions added."""
    base = plan or Plan(request.axis, n)
    parameters = dict(base.parameters)
    parameters.update({name: decisions.stored[node] for node, name in request.parameters.items()})
    graphs = {**base.graphs, fingerprint(gm): decisions.graph_plan()}
    chosen = {request.parameters[node]: choice for node, choice in decisions.weights.items()}
    weights = {**base.weights, **chosen}
    return replace(base, parameters=parameters, graphs=graphs, weights=weights)
