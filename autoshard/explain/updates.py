"""An optimizer's step as `Program.explain` tells it: who owns which matrix, bytes and seconds."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from autoshard.explain.costs import folded, named
from autoshard.explain.tables import human, table
from autoshard.runtime.optimizer import OwnedMatrix, ways_of
from autoshard.runtime.parameters import models_of, names_of

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
        (m.parameter, _what(m), m) for m in ways.owned
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


def _what(matrix: OwnedMatrix) -> str:
    return "each of a stack, once" if matrix.work.by_rows else "once"


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
