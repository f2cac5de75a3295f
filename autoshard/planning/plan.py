"""A plan: where every parameter lives and how every operator runs, as a file a person can edit.

The file is JSON. `parameters` holds the stored state of each parameter on the axis; `graphs`
holds, for each graph planned so far (train and eval are two), the strategy of every node as
text, `S(2), S(1), P -> P`, and the state of every shared copy. A loaded plan is a set of
constraints: what it names is obeyed, what a person deleted from it is planned afresh.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives import CHOICES, State, is_state
from autoshard.runtime.errors import PlanError
from autoshard.runtime.files import MOST_RANKS, FileEntry, read_json, write_whole
from autoshard.runtime.mesh import AXIS_ORDER

PLAN_VERSION = 2
PLAN_FILE = "plan.json"


def strategy_text(strategy: Strategy) -> str:
    """`inputs -> output`, the local algorithm where one replaces the operator, and for a mixture of
    experts what travels over ep."""
    output = strategy.output
    right = output if isinstance(output, str) else f"({', '.join(output)})"
    name = f" by {_name(strategy.impl)}" if strategy.impl else ""
    over_ep = f", {strategy.on_ep}{_OVER_EP}" if strategy.on_ep else ""
    return f"{', '.join(strategy.inputs)} -> {right}{name}{over_ep}".strip()


_OVER_EP = " over ep"


def without_ep(text: str) -> str:
    """A strategy's text without what travels over ep."""
    return text.rpartition(", ")[0] if text.endswith(_OVER_EP) else text


def _name(impl: Any) -> str:
    impl = getattr(impl, "func", impl)
    return str(getattr(impl, "__name__", impl))


@dataclass
class GraphPlan:
    """Decisions for one graph: strategy texts by node name, copy states by node name."""

    nodes: dict[str, str] = field(default_factory=dict)
    copies: dict[str, State] = field(default_factory=dict)


@dataclass
class PipelinePlan:
    """ranks: of pp. virtual_stages: stages of each rank. homes: the rank that stores each
    parameter, by its name. graphs: for each graph of a micro-batch, by its fingerprint, the first
    operator of each stage but the first."""

    ranks: int
    schedule: str
    microbatches: int
    virtual_stages: int = 1
    homes: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Plan:
    """The plan of a model on one mesh axis. `save` and `load` round-trip.

    mesh: sizes of all axes by name, where the plan was made for one mesh (`autoshard plan`); the
    backend uses it where no mesh is given. outer: of a mesh with two planned axes, the plan of the
    one that is planned first. pipeline: of a mesh with pp, its stages. weights: what dp_shard does
    with each parameter (`CHOICES`), where that was chosen.
    """

    axis: str
    size: int
    parameters: dict[str, State] = field(default_factory=dict)
    graphs: dict[str, GraphPlan] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    outer: Plan | None = None
    pipeline: PipelinePlan | None = None
    weights: dict[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """Equal on ranks that hold the same plan."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def text(self) -> str:
        """The file's text: stable, one decision a line."""
        return json.dumps({"version": PLAN_VERSION, **self._body()}, indent=1) + "\n"

    def _body(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "size": self.size,
            **({"mesh": self.mesh} if self.mesh else {}),
            "parameters": self.parameters,
            **({"weights": self.weights} if self.weights else {}),
            "graphs": {key: asdict(graph) for key, graph in self.graphs.items()},
            **({"outer": self.outer._body()} if self.outer else {}),
            **({"pipeline": asdict(self.pipeline)} if self.pipeline else {}),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path`; OutputError where that fails, and what was there stays."""
        write_whole(path, self.text(), "plan")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan, or that of a folder which `autoshard compile` wrote; PlanError names the
        file and the entry that is wrong."""
        if os.path.isdir(Path(path)):
            path = Path(path) / PLAN_FILE
        body = read_json(
            path, "plan file", PlanError, "Correct the entry, delete it, or save the plan again."
        )
        version = body.optional("version", None).value
        if version != PLAN_VERSION:
            raise PlanError(
                f"plan file {path} has version {version!r:.40}; this release reads {PLAN_VERSION}. "
                "Save it again with this release."
            )
        body.only(("version", *_ENTRIES, "outer", "pipeline"))
        plan, outer = _plan(body), body.optional("outer", None)
        if outer.value is not None:
            outer.only(_ENTRIES)
            plan.outer = _plan(outer)
        stages = body.optional("pipeline", None)
        if stages.value is not None:
            plan.pipeline = _pipeline(stages)
        return plan


_ENTRIES = ("axis", "size", "mesh", "parameters", "weights", "graphs")


def _plan(body: FileEntry) -> Plan:
    mesh = body.optional("mesh", {})
    mesh.only(AXIS_ORDER)
    sizes = {name: size.integer(1, MOST_RANKS) for name, size in mesh.entries().items()}
    if math.prod(sizes.values()) > MOST_RANKS:
        raise mesh.refused(f"a mesh of more than {MOST_RANKS:,} ranks")
    return Plan(
        body.entry("axis").text(*AXIS_ORDER),
        body.entry("size").integer(1, MOST_RANKS),
        {name: _stored(state) for name, state in body.entry("parameters").entries().items()},
        {name: _graph(graph) for name, graph in body.optional("graphs", {}).entries().items()},
        sizes,
        weights={
            name: choice.text(*CHOICES)
            for name, choice in body.optional("weights", {}).entries().items()
        },
    )


def _pipeline(entry: FileEntry) -> PipelinePlan:
    """The stages of a plan file, or PlanError with what is wrong."""
    entry.only(each.name for each in fields(PipelinePlan))
    ranks = entry.entry("ranks").integer(2, MOST_RANKS)
    homes, graphs = (entry.optional(name, {}).entries() for name in ("homes", "graphs"))
    return PipelinePlan(
        ranks=ranks,
        schedule=entry.entry("schedule").text("1f1b", "gpipe", "interleaved", "zb1"),
        microbatches=entry.entry("microbatches").integer(1, MOST_RANKS),
        virtual_stages=entry.optional("virtual_stages", 1).integer(1, MOST_RANKS),
        homes={name: home.integer(0, ranks - 1) for name, home in homes.items()},
        graphs={key: [one.text() for one in cuts.items()] for key, cuts in graphs.items()},
    )


def _stored(entry: FileEntry) -> State:
    state = entry.value
    if not isinstance(state, str) or not is_state(state) or state[0] in "RPZ":
        raise entry.refused(
            'which is no state to store in: use "I" (Replicate: whole on every rank) or '
            '"S(d)" (Shard(d))'
        )
    return state


def _graph(entry: FileEntry) -> GraphPlan:
    entry.only(("nodes", "copies"))
    nodes, copies = (entry.optional(name, {}).entries() for name in ("nodes", "copies"))
    for copy in copies.values():
        if not is_state(copy.text()):
            raise copy.refused('which is no state: use "I", "R", "P" or "S(d)"')
    return GraphPlan(
        {name: node.text() for name, node in nodes.items()},
        {name: copy.text() for name, copy in copies.items()},
    )
