"""What the HTML page of a program shows, as plain data: modules, collectives, memory, costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from autoshard.alternatives import alternatives
from autoshard.costs import costs, folded, named
from autoshard.module_graph import module_graph
from autoshard.passes.base import user_line
from autoshard.planning.values import global_bytes, tensor_bytes
from autoshard.program import Program
from autoshard.reasons import reason
from autoshard.runtime.placement import R, shard_dim

Json = dict[str, Any]

# More points than a page has pixels in width say nothing more.
_POINTS = 1200

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def page_data(program: Program) -> Json:
    """Everything the page draws; JSON holds it."""
    timeline = memory_timeline(program)
    memory = program.memory()
    return {
        "mesh": {axis.name: axis.size for axis in program.mesh.axes},
        "axis": program.axis.name,
        "hardware": program.decisions.builder.hardware.name,
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
        "forward": sum(1 for _ in program.joint.forward.graph.nodes),
        "nodes": len(timeline),
    }


def memory_timeline(program: Program) -> list[tuple[str, int]]:
    """(node, bytes alive after it) over the forward and then the backward graph.

    Alive is what a later node reads, through views too; inputs are not counted, gradients are from
    the moment they are made to the end of the step.
    """
    made = program.joint
    forward = _alive(made.forward, {}, keep=set(made.saved))
    if made.backward is None:
        return forward
    saved = {node.name: tensor_bytes(node.meta["val"]) for node in made.saved}
    return forward + _alive(made.backward, saved, keep=set())


def _alive(
    gm: fx.GraphModule, given: dict[str, int], keep: set[fx.Node]
) -> list[tuple[str, int]]:
    nodes = list(gm.graph.nodes)
    owner: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        base = node.args[0] if node.args and _is_view(node) else node
        owner[node] = owner.get(base, node) if isinstance(base, fx.Node) else node
        for source in node.all_input_nodes:
            last[owner[source]] = i
    alive = sum(given.values())
    dying: dict[int, int] = Counter()
    found = []
    for i, node in enumerate(nodes):
        size = 0
        if node.op == "placeholder":
            size = given.get(node.name, 0)
        elif node.op == "call_function" and owner[node] is node:
            size = tensor_bytes(node.meta.get("val"))
            alive += size
        if size and node not in keep:
            dying[last.get(node, i)] += size
        if node.op != "placeholder":
            found.append((node.name, alive))
        alive -= dying.pop(i, 0)
    return found


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return target is _WAIT or (isinstance(target, torch._ops.OpOverload) and target.is_view)


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
