"""What the HTML page of a program shows, as plain data: modules, collectives, memory, costs."""

from __future__ import annotations

from typing import Any

from autoshard.explain.alternatives import alternatives
from autoshard.explain.costs import costs, folded, named
from autoshard.explain.module_graph import module_graph
from autoshard.explain.reasons import reason
from autoshard.passes import user_line
from autoshard.planning import global_bytes
from autoshard.program import Program
from autoshard.runtime.collectives import R, shard_dim

Json = dict[str, Any]

# More points than a page has pixels in width say nothing more.
_POINTS = 1200


def page_data(program: Program) -> Json:
    """Everything the page draws; JSON holds it."""
    moments = program.memory_timeline()
    timeline = [(moment.node or moment.phase, moment.bytes) for moment in moments]
    memory = program.memory()
    return {
        "mesh": {axis.name: axis.size for axis in program.mesh.axes},
        "axis": program.axis.name,
        "hardware": program.decisions.hardware.name,
        "graph": module_graph(program),
        "parameters": _parameters(program),
        "collectives": _collectives(program),
        "alternatives": [
            {
                "name": one.name,
                "mesh": " ".join(f"{name}={size}" for name, size in one.mesh.items()),
                "sent": round(one.sent),
                "communication": one.communication,
                "arithmetic": one.arithmetic,
                "seconds": one.seconds,
                "stored": one.stored,
                "activations": one.activations,
                "batches": one.batches,
            }
            for one in alternatives(program)
        ],
        "memory": {
            kind: getattr(memory, kind)
            for kind in ("parameters", "gradients", "optimizer", "activations", "buffers")
        },
        "timeline": _thinned(timeline),
        "forward": sum(1 for moment in moments if moment.phase == "forward"),
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


def _parameters(program: Program) -> list[Json]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for node, name in program.parameters.items():
        states = {program.axis.name: program.decisions.stored[node], **program.data[node]}
        shape = "x".join(str(size) for size in node.meta["val"].shape)
        user = next(iter(node.users), node)
        key = (
            folded(name),
            shape,
            tuple(sorted(states.items())),
            reason(program, node),
            user_line(user),
            global_bytes(node),
        )
        groups.setdefault(key, []).append(name)
    return [
        {
            "name": named(names),
            "count": len(names),
            "shape": shape,
            "states": dict(states),
            "split": [axis for axis, state in states if shard_dim(state) is not None],
            "whole": all(state == R for _, state in states),
            "because": because,
            "line": line,
            "bytes": size * len(names),
        }
        for (_, shape, states, because, line, size), names in groups.items()
    ]


def _collectives(program: Program) -> list[Json]:
    return [
        {
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
        for one in costs(program)
    ]
