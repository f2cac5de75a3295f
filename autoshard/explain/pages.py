"""`Program.explain_html`: the plan as one HTML page that needs no network and no other file, around
its data as JSON; and the page of a pipeline: its stages as a table, its schedule as a picture,
without a script.

The graph of a program by module: who feeds whom, in which state, and what each edge moves.

A vertex is an operator that multiplies matrices, reads a parameter or has collectives of its own,
or one that joins values of several vertices (a residual addition, a gate). Operators between them
belong to the edges. Layers that are planned alike are one.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from typing import Any

from torch import fx

from autoshard.compiling import Built, Collective
from autoshard.explain.alternatives import Alternative
from autoshard.explain.costs import Cost, folded, named
from autoshard.explain.facts import Facts, ParameterGroup, carries_data
from autoshard.explain.reasons import operator_name
from autoshard.passes import module_path, user_line
from autoshard.planning import operands, strategy_text
from autoshard.runtime.collectives import I, State, shard_dim
from autoshard.runtime.files import write_whole

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
    groups: dict[tuple[Any, ...], Json] = {}
    for change in changes:
        for one, time, hidden in moved.get(change, ()):
            own = _fields(one, "op phase axis bytes")
            empty = {**own, "count": 0, "seconds": 0.0, "hidden": 0.0}
            entry = groups.setdefault(tuple(own.values()), empty)
            entry["count"] += 1
            entry["seconds"] += time
            entry["hidden"] += hidden
    return list(groups.values())


# More points than a page has pixels in width say nothing more.
_POINTS = 1200


def page_data(built: Built) -> Json:
    """Everything the page draws; JSON holds it."""
    facts = Facts(built)
    timeline = [(moment.node or moment.phase, moment.bytes) for moment in facts.moments]
    return {
        "mesh": built.mesh.sizes,
        "axis": built.axis.name,
        "hardware": built.machine.name,
        "graph": module_graph(facts),
        "parameters": [_parameter(group) for group in facts.parameters],
        "collectives": [_collective(one) for one in facts.costs],
        "alternatives": [_alternative(one) for one in facts.alternatives],
        "memory": _fields(facts.memory, "parameters gradients optimizer activations buffers"),
        "timeline": _thinned(timeline),
        "forward": sum(1 for moment in facts.moments if moment.phase == "forward"),
        "nodes": len(timeline),
    }


def _thinned(timeline: list[tuple[str, int]]) -> list[list[Any]]:
    """At most `_POINTS` points, each the highest of its stretch: [position, name, bytes]."""
    step = max(1, -(-len(timeline) // _POINTS))
    points = []
    for start in range(0, len(timeline), step):
        stretch = timeline[start : start + step]
        at = max(range(len(stretch)), key=lambda i: stretch[i][1])
        points.append([start + at, *stretch[at]])
    return points


def _parameter(group: ParameterGroup) -> Json:
    return {
        "name": named(group.names),
        "count": len(group.names),
        "split": [axis for axis, state in group.states.items() if shard_dim(state) is not None],
        "whole": all(state == I for state in group.states.values()),
        **_fields(group, "shape states choice because line bytes"),
    }


def _collective(one: Cost) -> Json:
    names = "op axis phase change bytes count seconds hidden line code"
    return {"modules": named(one.modules), **_fields(one, names)}


def _fields(one: object, names: str) -> Json:
    return {name: getattr(one, name) for name in names.split()}


def _alternative(one: Alternative) -> Json:
    return {
        "mesh": " ".join(f"{name}={size}" for name, size in one.mesh.items()),
        "sent": round(one.sent),
        "update": one.timing.optimizer,
        "activations": one.profile.activations.saved,
        **_fields(one.timing, "compute exposed"),
        **_fields(one, "name seconds stored batches"),
    }


def write_page(built: Built, path: str | os.PathLike[str]) -> None:
    write_whole(path, page(built), "page of the plan")


def page(built: Built) -> str:
    """The page's text: the template page.html around the data of `built`."""
    file = resources.files("autoshard.explain").joinpath("page.html")
    template = file.read_text(encoding="utf-8")
    # "</script>" in a user's line of code would end the element
    data = json.dumps(page_data(built), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", data)


Bar = tuple[str, float, float]
"""An action on a rank: its text, and when it starts and ends, in seconds."""

_WIDTH, _ROW = 1200.0, 26
_COLOURS = {"F": "#9ecae9", "B": "#f2b98a", "I": "#f2b98a", "W": "#a8d5a2"}
_STYLE = """
body { font: 14px/1.5 sans-serif; margin: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #ddd; }
svg text { font: 10px sans-serif; } .wide { overflow-x: auto; } li { margin: .3em 0; }
"""


def pipeline_page(
    summary: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str,
    stages: Sequence[str],
    ranks: Sequence[Sequence[Bar]],
) -> str:
    """The page's text. rows: a stage each, under `header`. ranks: what each does, and when."""
    head, *body = [_row("th", header), *(_row("td", row) for row in rows)]
    parts = [
        "<!doctype html><html><head><meta charset='utf-8'><title>Pipeline</title>",
        f"<style>{_STYLE}</style></head><body><h1>Pipeline</h1><p>{escape(summary)}</p>",
        f"<table>{head}{''.join(body)}</table><p>{escape(note)}</p>",
        "<h2>Schedule</h2><p>F: forward, B: backward, I and W: its parts by inputs and by weights, "
        "with the number of the micro-batch; as long as the search prices them.</p>",
        f"<div class='wide'>{_picture(ranks)}</div><h2>Stages</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in stages),
        "</ul></body></html>\n",
    ]
    return "".join(parts)


def _row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _picture(ranks: Sequence[Sequence[Bar]]) -> str:
    end = max((bar[2] for bars in ranks for bar in bars), default=0.0) or 1.0
    shapes = []
    for rank, bars in enumerate(ranks):
        y = rank * _ROW
        shapes.append(f"<text x='0' y='{y + 15}'>rank {rank}</text>")
        for text, start, stop in bars:
            x, width = 50 + _WIDTH * start / end, _WIDTH * (stop - start) / end
            said = escape(f"{text}: {1e3 * start:.3g} to {1e3 * stop:.3g} ms")
            shapes.append(
                f"<g><title>{said}</title><rect x='{x:.2f}' y='{y}' width='{width:.2f}' "
                f"height='{_ROW - 4}' fill='{_COLOURS[text[0]]}' stroke='#fff'/>"
                + (f"<text x='{x + 2:.2f}' y='{y + 15}'>{text}</text>" if width > 18 else "")
                + "</g>"
            )
    height = _ROW * len(ranks)
    return f"<svg width='{_WIDTH + 60:.0f}' height='{height}'>{''.join(shapes)}</svg>"
