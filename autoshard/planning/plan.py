"""A plan: where every parameter lives and how every operator runs, as a file a person can edit.

The file is JSON. `parameters` holds the stored state of each parameter on the axis; `graphs`
holds, for each graph planned so far (train and eval are two), the strategy of every node as
text, `S(2), S(1), P -> P`, and the state of every shared copy. A loaded plan is a set of
constraints: what it names is obeyed, what a person deleted from it is planned afresh.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives import State, is_state
from autoshard.runtime.errors import PlanError

PLAN_VERSION = 2


def strategy_text(strategy: Strategy) -> str:
    """`inputs -> output`, and the local algorithm where one replaces the operator."""
    output = strategy.output
    right = output if isinstance(output, str) else f"({', '.join(output)})"
    name = f" by {_name(strategy.impl)}" if strategy.impl else ""
    return f"{', '.join(strategy.inputs)} -> {right}{name}".strip()


def _name(impl: Any) -> str:
    impl = getattr(impl, "func", impl)
    return str(getattr(impl, "__name__", impl))


@dataclass
class GraphPlan:
    """Decisions for one graph: strategy texts by node name, copy states by node name."""

    nodes: dict[str, str] = field(default_factory=dict)
    copies: dict[str, State] = field(default_factory=dict)


@dataclass
class Plan:
    """The plan of a model on one mesh axis. `save` and `load` round-trip.

    mesh: sizes of all axes by name, where the plan was made for one mesh (`autoshard plan`); the
    backend uses it where no mesh is given.
    """

    axis: str
    size: int
    parameters: dict[str, State] = field(default_factory=dict)
    graphs: dict[str, GraphPlan] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)

    def digest(self) -> str:
        """Equal on ranks that hold the same plan."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def text(self) -> str:
        """The file's text: stable, one decision a line."""
        body = {
            "version": PLAN_VERSION,
            "axis": self.axis,
            "size": self.size,
            **({"mesh": self.mesh} if self.mesh else {}),
            "parameters": self.parameters,
            "graphs": {
                key: {"nodes": graph.nodes, "copies": graph.copies}
                for key, graph in self.graphs.items()
            },
        }
        return json.dumps(body, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path`."""
        Path(path).write_text(self.text())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan; PlanError names the file and the entry that is wrong."""
        try:
            body = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise PlanError(f"plan file {path} is not JSON: {error}") from error
        if not isinstance(body, dict) or body.get("version") != PLAN_VERSION:
            found = body.get("version") if isinstance(body, dict) else type(body).__name__
            raise PlanError(
                f"plan file {path} has version {found!r}; this release reads {PLAN_VERSION}. "
                "Save it again with this release."
            )
        missing = [key for key in ("axis", "size", "parameters") if key not in body]
        if missing:
            raise PlanError(f"plan file {path} has no {missing[0]!r}. Save it again.")
        for name, state in body["parameters"].items():
            if not is_state(state) or state in ("R", "P"):
                raise PlanError(
                    f"plan file {path}: parameter {name!r} is stored {state!r}; "
                    'use "I" (Replicate: whole on every rank) or "S(d)" (Shard(d))'
                )
        graphs = {
            key: GraphPlan(dict(graph.get("nodes", {})), dict(graph.get("copies", {})))
            for key, graph in body.get("graphs", {}).items()
        }
        mesh = {str(name): int(size) for name, size in body.get("mesh", {}).items()}
        return Plan(body["axis"], int(body["size"]), dict(body["parameters"]), graphs, mesh)
