"""What the HTML page of a program shows, as plain data: modules, collectives, memory, costs."""

from __future__ import annotations

from typing import Any

from autoshard.compiling import Built
from autoshard.explain.alternatives import Alternative
from autoshard.explain.costs import Cost, named
from autoshard.explain.facts import Facts, ParameterGroup
from autoshard.explain.module_graph import Json, module_graph
from autoshard.runtime.collectives import I, shard_dim

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
        "memory": {
            kind: getattr(facts.memory, kind)
            for kind in ("parameters", "gradients", "optimizer", "activations", "buffers")
        },
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
        "shape": group.shape,
        "states": dict(group.states),
        "split": [axis for axis, state in group.states.items() if shard_dim(state) is not None],
        "choice": group.choice,
        "whole": all(state == I for state in group.states.values()),
        "because": group.because,
        "line": group.line,
        "bytes": group.bytes,
    }


def _collective(one: Cost) -> Json:
    return {
        "op": one.op,
        "axis": one.axis,
        "phase": one.phase,
        "change": one.change,
        "bytes": one.bytes,
        "count": one.count,
        "seconds": one.seconds,
        "hidden": one.hidden,
        "modules": named(one.modules),
        "line": one.line,
        "code": one.code,
    }


def _alternative(one: Alternative) -> Json:
    return {
        "name": one.name,
        "mesh": " ".join(f"{name}={size}" for name, size in one.mesh.items()),
        "sent": round(one.sent),
        "compute": one.timing.compute,
        "exposed": one.timing.exposed,
        "update": one.timing.optimizer,
        "seconds": one.seconds,
        "stored": one.stored,
        "activations": one.profile.activations.saved,
        "batches": one.batches,
    }
