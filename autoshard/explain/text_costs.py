"""The parts of `explain` that are about cost: the dearest collective, all of them, alternatives, an
optimizer's step (who owns which matrix, bytes and seconds). Tables and amounts as text that fits a
terminal, or a pipe."""

import shutil
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from torch.optim import Optimizer

from autoshard.compiling import Built
from autoshard.explain.alternatives import Alternative
from autoshard.explain.costs import Cost, cause, folded, named, short
from autoshard.explain.facts import Facts
from autoshard.explain.reasons import operator_name
from autoshard.passes import module_path
from autoshard.planning import attention_form
from autoshard.runtime.collectives import in_words
from autoshard.runtime.optimizer import OwnedMatrix, ways_of
from autoshard.runtime.parameters import models_of, names_of


def dearest(facts: Facts, width: int) -> str:
    """One sentence: the collective that costs most, and the line that causes it."""
    found = facts.costs
    if not found:
        return ""
    one = found[0]
    share = _share(one.seconds, sum(each.seconds for each in found))
    lines = [
        f"Dearest: {one.op} in {one.phase} on {one.axis}, {one.count} of {human(one.bytes)}: "
        f"{milliseconds(one.seconds)} ms, {share} of the communication of a step",
        f"  caused in {named(one.modules) or 'the graph'}; matrix products may hide "
        f"{_share(one.hidden, one.seconds)} of it",
    ]
    if one.line:
        lines.append(f"  by {one.line}")
        lines.append(f"     {clipped(one.code, width - 5)}")
    return "\n".join(line.rstrip() for line in lines)


def by_module(facts: Facts, width: int) -> str:
    """What each module runs, and how: one row for equal places of repeated layers."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for node, how in facts.operators.items():
        groups[folded(module_path(node)), operator_name(node), how].append(module_path(node))
    rows = [
        [named(paths) or "(top)", str(len(paths)), operator, how]
        for (_, operator, how), paths in groups.items()
    ]
    if not rows:
        return ""
    header = ["module", "count", "operator", "states of its inputs -> of its result"]
    legend = "I Replicate, R Replicate with its gradient Partial, P Partial, S(d) Shard(d)"
    if facts.built.axis.name == "cp":
        legend += ", Z(d) Shard(d) in head-tail order"
    lines = [table(header, rows, width, right=(1,)), clipped(legend, width)]
    if (outer := facts.built.outer) is not None:
        forms = Counter(
            form for one in outer.decisions.strategies.items() if (form := attention_form(*one))
        )
        told = ", ".join(f"{form} in {count} places" for form, count in forms.items())
        on, first = facts.built.axis.name, outer.axis.name
        lines += textwrap.wrap(
            f"States are those on {on}. {_together(facts.built, on, first)}, and its changes of "
            f"state are operators here. Attention over {first}: {told or 'none'}.",
            width,
        )
    return "\n".join(lines)


def _together(built: Built, on: str, first: str) -> str:
    """How two axes were planned, and what is known of cheaper plans of both."""
    assert built.outer is not None
    gap = built.outer.gap(built.decisions)
    if gap is None:
        return f"{first} was planned before it, for itself"
    less = f"none that are more than {gap:.1%} cheaper" if gap else "none that are cheaper"
    return f"{first} was planned together with it: of all plans of the two there are {less}"


def collectives(facts: Facts, width: int) -> str:
    """Every collective by cost; under each, where it comes from.

    `hidden` is the share of the time that matrix products may cover.
    """
    found = facts.costs
    if not found:
        return "no collectives"
    header = ["ms", "hidden", "count", "collective", "axis", "phase", "bytes each", "change"]
    lines = table(header, [_row(one) for one in found], right=(0, 1, 2, 6)).splitlines()
    text = [clipped(line, width) for line in lines[:2]]
    for one, line in zip(found, lines[2:], strict=True):
        text += [clipped(line, width), *_where(one, width)]
    return "\n".join([*text, *_totals(facts, found, width)])


def fused(facts: Facts, width: int) -> str:
    """Which collectives are one operator with products, and why the others of their kind are not;
    nothing where none were to be."""
    fusing = facts.built.decisions.prices.fusing
    if fusing is None or facts.built.axis.size == 1:
        return ""
    found = Counter((one.phase, one.op) for one in facts.collectives if one.fused)
    told = ", ".join(f"{count} {op} {phase}" for (phase, op), count in sorted(found.items()))
    how = "" if fusing.always else ", each where a measurement at its first call says so"
    lines = [f"one operator with the products beside them: {told or 'none'}{how if told else ''}"]
    apart: Counter[tuple[str, ...]] = Counter()
    for one in facts.apart:
        module, line = cause(one.collective)
        apart[one.collective.op, one.collective.phase, one.reason, folded(module), line] += 1
    rows = [
        [f"{op} {phase}", str(count), reason, module, short(line)]
        for (op, phase, reason, module, line), count in apart.items()
    ]
    header = ["apart from products", "count", "because", "module", "line"]
    return "\n".join([*lines, table(header, rows, width, right=(1,))] if rows else lines)


def _row(one: Cost) -> list[str]:
    return [
        milliseconds(one.seconds),
        _share(one.hidden, one.seconds),
        str(one.count),
        one.op,
        one.axis,
        one.phase,
        human(one.bytes),
        in_words(one.change) or "-",
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.0f}%"


def _where(one: Cost, width: int) -> list[str]:
    place = " ".join(filter(None, (named(one.modules), f"({short(one.line)})" * bool(one.line))))
    return [clipped(f"       {text}", width) for text in (place, one.code) if text]


def _totals(facts: Facts, found: list[Cost], width: int) -> list[str]:
    """What a rank sends in each phase, about how long that takes, and the count of each kind."""
    machine, lines = facts.built.machine.name, []
    for phase in ("forward", "backward") if facts.trains else ("forward",):
        these = [one for one in found if one.phase == phase]
        lines.append(
            f"{phase}: a rank sends {human(sum(one.sent for one in these))}, about "
            f"{milliseconds(sum(one.seconds for one in these))} ms "
            f"on {machine}"
        )
    by_op: Counter[tuple[str, str]] = Counter()
    for one in found:
        by_op[one.phase, one.op] += one.count
    total = ", ".join(f"{count} {op} {phase}" for (phase, op), count in sorted(by_op.items()))
    total = f"{sum(by_op.values())} collectives a step: {total}"
    return [*lines, *textwrap.wrap(total, width, subsequent_indent="  ")]


def beside(facts: Facts, width: int) -> str:
    """The cost of the plan beside plans with a name, as a table with a note."""
    found = facts.alternatives
    if not found:
        return ""
    header = ["plan", "mesh", "sends", "comm ms", "compute ms", "ms a batch", "weights", "saved"]
    rows = [_alternative(one) for one in found]
    lines = [table(header, rows, width, right=(2, 3, 4, 5, 6))]
    note = (
        "ms a batch: a step for one example batch, comm overlapped where it can be, as `autoshard "
        "plan` predicts it. "
    )
    if facts.trains:
        note += (
            "weights: with gradients and Adam's moments, a rank. saved: for the backward, about."
        )
    else:
        note += "weights: of a rank; nothing is trained in this graph."
    if more := next((one for one in found if one.batches > 1), None):
        note += f" Without tp the ranks consume {more.batches} times the batches a step."
    return "\n".join([*lines, *textwrap.wrap(note, width)])


def _alternative(one: Alternative) -> list[str]:
    return [
        one.name,
        " ".join(f"{name}={size}" for name, size in one.mesh.items()),
        human(one.sent),
        milliseconds(one.communication),
        milliseconds(one.timing.compute),
        milliseconds(one.seconds),
        human(one.stored),
        human(one.profile.activations.saved),
    ]


_SHOWN = 16


def update(optimizer: Optimizer, width: int) -> str:
    """A line for how many parameters are stepped on parts, a table of the others."""
    ways = ways_of(optimizer)
    if ways is None:
        return "the optimizer steps stored tensors: give it to autoshard.optimizer"
    on_parts = [part.parameter for group in ways.on_parts for part in group]
    rest = [p for group in ways.rest for p in group]
    every: list[Any] = [*on_parts, *(matrix.parameter for matrix in ways.owned), *rest]
    names = names_of(models_of(every))
    found: dict[tuple[str, str, str], list[tuple[str, OwnedMatrix | None]]] = {}
    told: list[tuple[Any, str, OwnedMatrix | None]] = [
        (m.parameter, "each of a stack, once" if m.work.by_rows else "once", m) for m in ways.owned
    ]
    told += [(p, f"on every rank: {ways.why[p]}", None) for p in rest]
    for p, what, one in told:
        name = names.get(p, "").replace("_orig_mod.", "")
        key = folded(name), "x".join(map(str, p.shape)), what
        found.setdefault(key, []).append((name, one))
    rows = []
    for (_, shape, what), members in found.items():
        matrices = [matrix for _, matrix in members if matrix is not None]
        seconds = sum(matrix.seconds(ways.rates) for matrix in matrices)
        figures = ["", ""]
        if matrices:
            figures = [human(sum(m.nbytes() for m in matrices)), f"{1e3 * seconds:.3g}"]
        name = named([name for name, _ in members])
        rows.append([name, str(len(members)), shape, *figures, what, _owners(matrices)])
    said = f"the optimizer's step: {len(on_parts)} of {len(every)} parameters on each rank's part"
    if ways.owned:
        sent = human(sum(matrix.nbytes() for matrix in ways.owned))
        said += (
            f"\n{len(ways.owned)} by owners, once a mesh: {sent} sent by all ranks, "
            f"{1e3 * ways.seconds:.3g} ms of the one with most"
        )
    header = ["stepped whole", "count", "shape", "sent", "ms", "what", "by ranks"]
    return said + ("\n\n" + table(header, rows, width) if rows else "")


def _owners(matrices: list[OwnedMatrix]) -> str:
    """The owners of matrices in their order; of stacks how many matrices each rank steps."""
    told = []
    for matrix in matrices:
        own = {matrix.sharers.ranks[place]: matrix.rows[place] for place in matrix.owners}
        if matrix.work.by_rows:
            told.append(", ".join(f"{a}-{b - 1} by {rank}" for rank, (a, b) in own.items()))
        else:
            told += map(str, own)
    if all(matrix.work.by_rows for matrix in matrices):
        told = list(dict.fromkeys(told))
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return " ".join(told[:_SHOWN]) + more


PIPE_WIDTH = 100


def page_width(width: int | None = None) -> int:
    """Columns to fill: `width` where it is given, else the terminal's, else 100; 60 at least."""
    if width is None:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns if terminal else PIPE_WIDTH
    return max(60, width)


def human(nbytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def milliseconds(seconds: float) -> str:
    """0.00123 -> '1.23', three digits, without an exponent: 0.0000012 -> '0.001'."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}" if value < 1 else f"{value:.3g}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int = 10**6,
    right: Collection[int] = (),
    shorten: int | None = None,
) -> str:
    """Columns padded to their widest cell.

    Where lines would pass `width`, the column `shorten` keeps the ends of its cells, which tell
    names of modules apart; without one the last column wraps. Either gets 20 characters at least.
    right: the columns that are aligned to the right.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    flexible = len(widths) - 1 if shorten is None else shorten
    others = sum(widths) - widths[flexible] + 2 * (len(widths) - 1)
    widths[flexible] = min(widths[flexible], max(width - others, 20))
    lines = []
    for row in [header, ["-" * w for w in widths], *rows]:
        first, more = list(row), []
        if shorten is None:
            room = max(widths[-1], 1)
            wrapped = textwrap.wrap(row[-1], room, break_on_hyphens=False, break_long_words=False)
            first[-1], more = (wrapped or [""])[0], wrapped[1:]
        elif len(row[shorten]) > widths[shorten]:
            first[shorten] = "..." + row[shorten][3 - widths[shorten] :]
        cells = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(first, widths))
        ]
        lines.append("  ".join(cells).rstrip())
        lines += [" " * others + rest for rest in more]
    return "\n".join(lines)


def clipped(text: str, width: int) -> str:
    """`text`, or its start and an ellipsis, in at most `width` characters."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."
