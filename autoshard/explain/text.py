"""`Program.explain()`: the plan, where each parameter is and why, what each collective costs."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch import fx

from autoshard.explain import text_costs
from autoshard.explain.costs import folded, named
from autoshard.explain.reasons import reason, whole
from autoshard.explain.tables import human, page_width, table
from autoshard.memory import KINDS
from autoshard.planning import global_bytes, value
from autoshard.program import Program
from autoshard.runtime.collectives import R


def explain(program: Program, width: int | None = None) -> str:
    """A report for a terminal or a log file; repeated layers are one line with a count.

    width: columns; None: the terminal's, or 100 where standard output is none.
    """
    columns = page_width(width)
    sections = [
        _headline(program),
        program.chosen,
        _held(program),
        text_costs.dearest(program, columns),
        text_costs.by_module(program, columns),
        _parameters(program, columns),
        _unsharded(program, columns),
        _without_gradient(program),
        text_costs.collectives(program, columns),
        text_costs.beside(program, columns),
        _memory(program),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def explain_plan(program: Program, width: int | None = None) -> str:
    """The parts of `explain` that need no backward graph: while a program is being compiled."""
    columns = page_width(width)
    sections = [
        _headline(program),
        _held(program),
        text_costs.by_module(program, columns),
        _parameters(program, columns),
        _unsharded(program, columns),
        text_costs.beside(program, columns),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _headline(program: Program) -> str:
    total = sum(global_bytes(node) for node in program.parameters)
    sharded = sum(global_bytes(node) for node in program.parameters if _placed(program, node) != R)
    axes = [axis for axis in program.mesh.axes if axis.size > 1] or [program.axis]
    share = 100 * sharded / total if total else 0.0
    return (
        f"autoshard: {', '.join(f'{axis.name}={axis.size}' for axis in axes)}, "
        f"{len(program.parameters)} parameters, {human(total)} in all, "
        f"{share:.1f}% of the bytes sharded"
    )


def _held(program: Program) -> str:
    held = program.decisions.held
    if not held:
        return ""
    names = ", ".join(node.name for node in held[:4]) + (", ..." if len(held) > 4 else "")
    total = len(program.decisions.strategies)
    return (
        f"Not the cheapest plan: {len(held)} of {total} values are held "
        f"replicated, since to choose for all of them at once would take too long ({names})"
    )


def _parameters(program: Program, width: int) -> str:
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    bytes_of: Counter[tuple[str, ...]] = Counter()
    for node, name in program.parameters.items():
        shape = "x".join(str(extent) for extent in value(node).shape)
        state = _placed(program, node)
        key = (folded(name), shape, state, reason(program, node))
        groups[key].append(name)
        bytes_of[key] += global_bytes(node)
    rows = [
        [named(names), str(len(names)), shape, state, human(bytes_of[key]), because]
        for key, names in groups.items()
        for _, shape, state, because in [key]
    ]
    return table(["parameter", "count", "shape", "stored", "bytes", "because"], rows, width)


def _placed(program: Program, node: fx.Node) -> str:
    """Where a parameter is stored: `S(1)`; on a mesh of several axes `S(0)@dp_shard, S(1)@tp`."""
    axes = [axis for axis in program.mesh.axes if axis.size > 1]
    if [axis.name for axis in axes] in ([], [program.axis.name]):
        return program.decisions.stored[node]
    states = {**program.data[node], program.axis.name: program.decisions.stored[node]}
    split = [f"{states[a.name]}@{a.name}" for a in axes if states.get(a.name, R) != R]
    return ", ".join(split) or R


def _unsharded(program: Program, width: int) -> str:
    groups: dict[tuple[str, ...], int] = defaultdict(int)
    for w in whole(program):
        name = folded(w.name) if w.kind == "parameter" else w.name
        groups[w.kind, name, w.reason, w.where] += 1
    rows = [[kind, name, str(n), why, where] for (kind, name, why, where), n in groups.items()]
    return table(["not sharded", "", "count", "because", "line"], rows, width) if rows else ""


def _without_gradient(program: Program) -> str:
    """Nothing in inference; in training the parameters that an optimizer would not move."""
    names = program.without_gradient()
    if program.joint.backward is None or not names:
        return ""
    groups = Counter(folded(name) for name in names)
    lines = [f"  {name}" + (f"  x {n}" if n > 1 else "") for name, n in groups.items()]
    return "\n".join(["trained, and no gradient in this graph:", *lines])


def _memory(program: Program) -> str:
    memory = program.memory()
    at = memory.peak_at
    rows = [
        [kind, human(getattr(memory, kind)), human(at.held[kind])]
        for kind in KINDS
        if getattr(memory, kind)
    ]
    where = f"peak, in {at.phase}" + (f" at {at.node}" if at.node else "")
    rows.append([where, "", human(memory.peak)])
    return table(["a rank holds (AdamW)", "at most", "at the peak"], rows)
