"""`Program.explain()`: the plan, where each parameter is and why, what each collective costs."""

from __future__ import annotations

from collections import Counter, defaultdict

from autoshard import explain_costs
from autoshard.costs import folded, named
from autoshard.planning.strategy import value
from autoshard.planning.values import global_bytes
from autoshard.program import Program
from autoshard.reasons import reason, whole
from autoshard.runtime.placement import shard_dim
from autoshard.tables import human, page_width, table


def explain(program: Program, width: int | None = None) -> str:
    """A report for a terminal or a log file; repeated layers are one line with a count.

    width: columns; None: the terminal's, or 100 where standard output is none.
    """
    columns = page_width(width)
    sections = [
        _headline(program),
        explain_costs.dearest(program, columns),
        explain_costs.by_module(program, columns),
        _parameters(program, columns),
        _unsharded(program, columns),
        explain_costs.collectives(program, columns),
        explain_costs.beside(program, columns),
        _memory(program),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def explain_plan(program: Program, width: int | None = None) -> str:
    """The parts of `explain` that need no backward graph: while a program is being compiled."""
    columns = page_width(width)
    sections = [
        _headline(program),
        explain_costs.by_module(program, columns),
        _parameters(program, columns),
        _unsharded(program, columns),
        explain_costs.beside(program, columns),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _headline(program: Program) -> str:
    total = sum(global_bytes(node) for node in program.parameters)
    sharded = sum(
        global_bytes(node)
        for node in program.parameters
        if shard_dim(program.decisions.stored[node]) is not None
    )
    share = 100 * sharded / total if total else 0.0
    return (
        f"autoshard: {program.axis.name}={program.axis.size}, "
        f"{len(program.parameters)} parameters, {human(total)} in all, "
        f"{share:.1f}% of the bytes sharded"
    )


def _parameters(program: Program, width: int) -> str:
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    bytes_of: Counter[tuple[str, ...]] = Counter()
    for node, name in program.parameters.items():
        shape = "x".join(str(extent) for extent in value(node).shape)
        state = program.decisions.stored[node]
        key = (folded(name), shape, state, reason(program, node))
        groups[key].append(name)
        bytes_of[key] += global_bytes(node)
    rows = [
        [named(names), str(len(names)), shape, state, human(bytes_of[key]), because]
        for key, names in groups.items()
        for _, shape, state, because in [key]
    ]
    return table(["parameter", "count", "shape", "stored", "bytes", "because"], rows, width)


def _unsharded(program: Program, width: int) -> str:
    groups: dict[tuple[str, ...], int] = defaultdict(int)
    for w in whole(program):
        name = folded(w.name) if w.kind == "parameter" else w.name
        groups[w.kind, name, w.reason, w.where] += 1
    rows = [[kind, name, str(n), why, where] for (kind, name, why, where), n in groups.items()]
    return table(["not sharded", "", "count", "because", "line"], rows, width) if rows else ""


def _memory(program: Program) -> str:
    memory = program.memory()
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
    rows = [[kind, human(getattr(memory, kind))] for kind in kinds]
    return table(["a rank holds", ""], rows)
