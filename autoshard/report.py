"""`Program.explain()`: where each parameter is and why, each collective, bytes a rank; as text."""

from __future__ import annotations

from collections import Counter

from torch import fx

from autoshard.planning.strategy import operands, value
from autoshard.planning.values import global_bytes
from autoshard.program import Program
from autoshard.runtime.placement import R, State, shard_dim


def explain(program: Program) -> str:
    """A report for a terminal or a log file."""
    sections = [_headline(program), _parameters(program), _collectives(program), _memory(program)]
    return "\n\n".join(sections) + "\n"


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
    sharded = sum(
        global_bytes(node)
        for node in program.parameters
        if shard_dim(program.decisions.stored[node]) is not None
    )
    share = 100 * sharded / total if total else 0.0
    return (
        f"autoshard: {program.axis.name}={program.axis.size}, "
        f"{len(program.parameters)} parameters, {human(total)} in all, "
        f"{share:.1f}% of the bytes sharded; "
        f"predicted cost {program.decisions.seconds:.3g} s a step"
    )


def _parameters(program: Program) -> str:
    rows = []
    for node, name in program.parameters.items():
        val = value(node)
        shape = "x".join(str(e) for e in val.shape)
        state = program.decisions.stored[node]
        rows.append([name, shape, state, human(global_bytes(node)), reason(program, node)])
    return table(["parameter", "shape", "stored", "bytes", "because"], rows)


def reason(program: Program, node: fx.Node) -> str:
    """Why a parameter is where it is, in one clause."""
    decisions = program.decisions
    state = decisions.stored[node]
    uses: list[tuple[fx.Node, State]] = []
    for user in node.users:
        strategy = decisions.strategies.get(user)
        if strategy is not None:
            states = [s for o, s in zip(operands(user), strategy.inputs) if o is node]
            uses.append((user, states[0] if states else R))
    if not uses:
        return "unused in this graph"
    user, use = uses[0]
    where = operator_name(user)
    if state == R:
        declined = decisions.declined.get(user)
        if declined and max(value(node).shape, default=0) >= program.axis.size:
            return f"{where}: {declined[0]}"
        return f"{where} runs whole; splitting saves less than its collectives cost"
    if use == state:
        return f"{where} runs on the shard"
    if shard_dim(use) is None:
        return f"{where} needs it whole: gathered before use"
    return f"{where} uses {use}: moved before use"


def operator_name(node: fx.Node) -> str:
    """`linear` for aten.linear.default."""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def _collectives(program: Program) -> str:
    found = program.collectives()
    if not found:
        return "no collectives"
    counts: Counter[tuple[str, str, str, int, str]] = Counter()
    for c in found:
        counts[c.phase, c.op, c.module, c.bytes, c.change.partition(": ")[2] or "-"] += 1
    rows = [
        [phase, op, str(count), human(nbytes), human(nbytes * count), change, module]
        for (phase, op, module, nbytes, change), count in counts.items()
    ]
    header = ["phase", "collective", "count", "bytes each", "bytes", "change", "module"]
    by_op = Counter((c.phase, c.op) for c in found)
    total = ", ".join(f"{count} {op} {phase}" for (phase, op), count in sorted(by_op.items()))
    return table(header, rows) + f"\n{len(found)} collectives a step: {total}"


def _memory(program: Program) -> str:
    memory = program.memory()
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
    rows = [[kind, human(getattr(memory, kind))] for kind in kinds]
    return table(["a rank holds", ""], rows)
