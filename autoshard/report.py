"""`Program.explain()`: where each parameter is and why, each collective, bytes a rank; as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import fx

from autoshard.memory import KINDS
from autoshard.planning import cost
from autoshard.planning.strategy import value
from autoshard.planning.values import global_bytes
from autoshard.program import Program
from autoshard.reasons import reason, whole
from autoshard.runtime.placement import R


def explain(program: Program) -> str:
    """A report for a terminal or a log file; repeated layers are one line with a count."""
    sections = [
        _headline(program),
        program.chosen,
        _parameters(program),
        _unsharded(program),
        _without_gradient(program),
        _collectives(program),
        _memory(program),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def folded(path: str) -> str:
    """`model.layers.7.mlp` -> `model.layers.*.mlp`: the place in a layer, whichever layer."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def named(paths: Iterable[str]) -> str:
    """One path as it is, several as their common folded path."""
    distinct = list(dict.fromkeys(paths))
    return distinct[0] if len(distinct) == 1 else folded(distinct[0])


def human(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell; numbers are right-aligned by the caller."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in
             [header, ["-" * w for w in widths], *rows]]
    return "\n".join(lines)


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


def _parameters(program: Program) -> str:
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
    return table(["parameter", "count", "shape", "stored", "bytes", "because"], rows)


def _placed(program: Program, node: fx.Node) -> str:
    """Where a parameter is stored: `S(1)`; on a mesh of several axes `S(0)@dp_shard, S(1)@tp`."""
    axes = [axis for axis in program.mesh.axes if axis.size > 1]
    if [axis.name for axis in axes] in ([], [program.axis.name]):
        return program.decisions.stored[node]
    states = {**program.data[node], program.axis.name: program.decisions.stored[node]}
    split = [f"{states[a.name]}@{a.name}" for a in axes if states.get(a.name, R) != R]
    return ", ".join(split) or R


def _unsharded(program: Program) -> str:
    groups: dict[tuple[str, ...], int] = defaultdict(int)
    for w in whole(program):
        name = folded(w.name) if w.kind == "parameter" else w.name
        groups[w.kind, name, w.reason, w.where] += 1
    rows = [[kind, name, str(n), why, where] for (kind, name, why, where), n in groups.items()]
    return table(["not sharded", "", "count", "because", "line"], rows) if rows else ""


def _without_gradient(program: Program) -> str:
    """Nothing in inference; in training the parameters that an optimizer would not move."""
    names = program.without_gradient()
    if program.joint.backward is None or not names:
        return ""
    groups = Counter(folded(name) for name in names)
    lines = [f"  {name}" + (f"  x {n}" if n > 1 else "") for name, n in groups.items()]
    return "\n".join(["trained, and no gradient in this graph:", *lines])


def _collectives(program: Program) -> str:
    found = program.collectives()
    if not found:
        return "no collectives"
    groups: dict[tuple[str, str, str, int, str], list[str]] = defaultdict(list)
    for c in found:
        change = c.change.partition(": ")[2] or "-"
        groups[c.phase, c.op, folded(c.module), c.bytes, change].append(c.module)
    rows = [
        [phase, op, str(len(at)), human(nbytes), human(nbytes * len(at)), change, named(at)]
        for (phase, op, _, nbytes, change), at in groups.items()
    ]
    header = ["phase", "collective", "count", "bytes each", "bytes", "change", "module"]
    return "\n".join([table(header, rows), *_totals(program)])


def _totals(program: Program) -> list[str]:
    """What a rank sends in each phase, about how long that takes, and the count of each kind."""
    n, builder, found = program.axis.size, program.decisions.builder, program.collectives()
    lines = []
    for phase in ("forward", "backward"):
        parts = [(c.op, c.bytes) for c in found if c.phase == phase]
        sent = sum(cost.ring_bytes(op, nbytes, n) for op, nbytes in parts)
        seconds = sum(cost.collective_seconds(op, nbytes, n, builder.link) for op, nbytes in parts)
        lines.append(
            f"{phase}: a rank sends {human(sent)}, about {1e3 * seconds:.3g} ms "
            f"on {builder.hardware.name}"
        )
    by_op = Counter((c.phase, c.op) for c in found)
    total = ", ".join(f"{count} {op} {phase}" for (phase, op), count in sorted(by_op.items()))
    return [*lines, f"{len(found)} collectives a step: {total}"]


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
