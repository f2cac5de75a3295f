"""The graph of a program by module: who feeds whom, in which state, and what each edge moves.

A vertex is an operator that multiplies matrices, reads a parameter or has collectives of its own,
or one that joins values of several vertices (a residual addition, a gate). Operators between them
belong to the edges. Layers that are planned alike are one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from torch import fx

from autoshard.compiling import Built, Collective
from autoshard.explain.costs import folded, named
from autoshard.explain.facts import Facts, carries_data
from autoshard.explain.reasons import operator_name
from autoshard.passes import module_path, user_line
from autoshard.planning import operands, strategy_text
from autoshard.runtime.collectives import State

Json = dict[str, Any]

# What flows into a node: the vertices it comes from, each with the changes on the way.
_Sources = dict[fx.Node, tuple[str, ...]]


def module_graph(facts: Facts) -> Json:
    """{"vertices": [...], "edges": [...]}; an edge names its ends by position among the vertices,
    the last of which is what the graph returns.

    A vertex has its module's name, the layer it belongs to ("" outside of any), how often it
    stands for, its operator, strategy, state and line. An edge has its state changes, and the
    collectives of forward and backward with bytes, seconds and the seconds that may be hidden.
    """
    built, plans = facts.built, dict(facts.operators)
    sources = _sources(built, plans)
    names = _names(plans)
    position = {name: i for i, name in enumerate(dict.fromkeys(names[node] for node in plans))}
    vertices: list[Json] = [{"count": 0} for _ in position]
    for node, how in plans.items():
        vertex = vertices[position[names[node]]]
        vertex.setdefault("layer", names[node][0])
        vertex.setdefault("name", names[node][0] + names[node][1])
        vertex.setdefault("operator", operator_name(node))
        vertex.setdefault("plan", how)
        vertex.setdefault("state", how.rpartition("-> ")[2].partition(" ")[0])
        vertex.setdefault("line", user_line(node))
        vertex["count"] += 1
    edges: dict[tuple[int, int], list[str]] = defaultdict(list)
    count: Counter[tuple[int, int]] = Counter()
    for node in plans:
        for source, changes in sources[node].items():
            key = (position[names[source]], position[names[node]])
            count[key] += 1
            edges[key] += changes
    for source, changes in _returned(built, sources, plans).items():
        key = (position[names[source]], len(vertices))
        count[key] += 1
        edges[key] += changes
    states = built.decisions.outputs
    vertices.append(
        {
            "count": 1,
            "layer": "",
            "name": "output",
            "operator": "returned",
            "plan": ", ".join(states),
            "state": states[0] if states else "",
            "line": "",
        }
    )
    return {
        "vertices": vertices,
        "edges": [
            {
                "from": start,
                "to": end,
                "count": count[start, end],
                "changes": sorted({text.partition(": ")[2] for text in changes}),
                "collectives": _together(dict.fromkeys(changes), facts.moved),
            }
            for (start, end), changes in edges.items()
        ],
    }


def _sources(built: Built, plans: dict[fx.Node, str]) -> dict[fx.Node, _Sources]:
    """What flows into each node; nodes that join several values are added to `plans`."""
    found: dict[fx.Node, _Sources] = {}
    order: dict[fx.Node, str] = {}
    flows = carries_data(built)
    for node in built.serial.graph.nodes:
        if not flows(node):
            continue
        mine: _Sources = {}
        arms = []
        for source, changes in _reads(built, node, flows):
            come = {source: ()} if source in order else found.get(source, {})
            arms.append(set(come))
            for vertex, before in come.items():
                mine[vertex] = (*mine.get(vertex, ()), *before, *changes)
        found[node] = mine
        strategy = built.decisions.strategies.get(node)
        if node in plans:
            order[node] = plans[node]
        elif strategy is not None and any(a - b and b - a for a in arms for b in arms):
            order[node] = strategy_text(strategy)
    plans.clear()
    plans.update(order)
    return found


def _reads(
    built: Built, node: fx.Node, flows: Callable[[fx.Node], bool]
) -> list[tuple[fx.Node, tuple[str, ...]]]:
    """(differentiable operand, the changes between its state and the one the node wants)."""
    strategy = built.decisions.strategies.get(node)
    found = []
    for i, source in enumerate(operands(node) or node.all_input_nodes):
        if not flows(source):
            continue
        known = strategy is not None and i < len(strategy.inputs)
        changes = _changes(built, source, strategy.inputs[i]) if strategy and known else ()
        found.append((source, changes))
    return found


def _changes(built: Built, source: fx.Node, want: State) -> tuple[str, ...]:
    """The changes between the state a value is produced in and the one that is wanted."""
    decisions, found = built.decisions, []
    have = decisions.state(source)
    for state in decisions.route(source, want):
        if state != have:
            found.append(f"{source.name}: {have} -> {state}")
        have = state
    return tuple(found)


def _returned(built: Built, sources: dict[fx.Node, _Sources], plans: Any) -> _Sources:
    """What flows into the graph's output."""
    results: Any = next(iter(reversed(built.serial.graph.nodes))).args[0]
    flows, found = carries_data(built), _Sources()
    for result, state in zip(results, built.decisions.outputs):
        if isinstance(result, fx.Node) and flows(result):
            come = {result: ()} if result in plans else sources[result]
            for vertex, before in come.items():
                changes = (*before, *_changes(built, result, state))
                found[vertex] = (*found.get(vertex, ()), *changes)
    return found


def _names(plans: dict[fx.Node, str]) -> dict[fx.Node, tuple[str, str, tuple[str, int]]]:
    """(layers, the rest of the module's path and the operator, occurrence) of each vertex."""
    layers: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for node, how in plans.items():
        prefix = _layer(module_path(node))
        layers[prefix].append((module_path(node)[len(prefix) :], operator_name(node), how))
    alike: dict[str, list[str]] = defaultdict(list)
    for prefix, content in layers.items():
        alike[f"{folded(prefix)} {content}"].append(prefix)
    together = {prefix: named(same) for same in alike.values() for prefix in same}
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for node in plans:
        path = module_path(node)
        prefix = _layer(path)
        occurrence = seen[path, operator_name(node)]
        seen[path, operator_name(node)] += 1
        rest = path[len(prefix) :]
        found[node] = (together[prefix], rest, (operator_name(node), occurrence))
    return found


def _layer(path: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up`; "" of a path without a number."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def _together(
    changes: dict[str, None], moved: dict[str, list[tuple[Collective, float, float]]]
) -> list[Json]:
    groups: dict[tuple[str, str, str, int], Json] = {}
    for change in changes:
        for one, time, hidden in moved.get(change, ()):
            entry = groups.setdefault(
                (one.op, one.phase, one.axis, one.bytes),
                {
                    "op": one.op,
                    "phase": one.phase,
                    "axis": one.axis,
                    "bytes": one.bytes,
                    "count": 0,
                    "seconds": 0.0,
                    "hidden": 0.0,
                },
            )
            entry["count"] += 1
            entry["seconds"] += time
            entry["hidden"] += hidden
    return list(groups.values())
