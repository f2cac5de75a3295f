"""Tandem repeats of a graph: where it does the same several times in a row.

What a node does is said by a label: operator, arguments, metadata; its inputs by what a caller
calls them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.runtime.compat import size_symbols

FEWEST = 3
"""Equal stretches below which none is looked for."""

_SHORTEST = 8  # operators of a period: fewer are no layer


def tandem_repeats(labels: Sequence[str]) -> list[tuple[int, int, int]]:
    """(start, period, count) of the tandem repeats, that of most operators first taken."""
    found: list[tuple[int, int, int]] = []
    todo = [(0, len(labels))]
    while todo:
        low, high = todo.pop()
        best = _best_run(labels[low:high])
        if best is not None:
            start, period, count = best[0] + low, *best[1:]
            found.append((start, period, count))
            todo += [(low, start), (start + period * count, high)]
    return sorted(found)


def _best_run(labels: Sequence[str]) -> tuple[int, int, int] | None:
    where: dict[str, int] = {}
    distances: Counter[int] = Counter()
    for i, label in enumerate(labels):
        if label in where:
            distances[i - where[label]] += 1
        where[label] = i
    best, most = None, 0
    for period, _ in distances.most_common(24):
        run = 0
        for i in range(len(labels) - period) if period >= _SHORTEST else ():
            run = run + 1 if labels[i] == labels[i + period] else 0
            count = run // period + 1
            if count >= FEWEST and (count - 1) * period > most:
                best, most = (i - run + 1, period, count), (count - 1) * period
    return best


def label(node: fx.Node, name: Callable[[fx.Node], Any] = lambda node: "") -> str:
    """What a node does, as text; its inputs by `name`."""
    # a string that an operator is given could be told from them by its place only: no operator
    # takes a string where it takes a node
    shown = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{name(n)}")
    target = node.target
    if node.op == "get_attr":
        value = operator.attrgetter(str(target))(node.graph.owning_module)
        target = value.code if isinstance(value, fx.GraphModule) else target
    return f"{target} {shown} {described(value_of(node), where=False)}"


def described(val: Any, where: bool) -> str:
    """What a compiler asks about a value; `where`: of its place in its storage too."""
    if isinstance(val, torch.Tensor):
        place = val.storage_offset() if where else ""
        return f"{val.dtype}{list(val.shape)}{list(val.stride())}{val.device}{place}"
    if isinstance(val, (list, tuple)):
        return ",".join(described(one, where) for one in val)
    return f"{type(val).__name__} {val}"


def value_of(node: fx.Node) -> Any:
    """The fake of what a node makes, of Dynamo's graph too."""
    return node.meta.get("val", node.meta.get("example_value"))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fakes of what a node makes."""
    val = value_of(node)
    values = val if isinstance(val, (list, tuple)) else (val,)
    return [each for each in values if isinstance(each, torch.Tensor)]


def writes(target: Any) -> bool:
    """Whether an operator writes to what it reads."""
    return hasattr(target, "_schema") and target._schema.is_mutable


def symbols(val: Any) -> set[str]:
    """The names of the symbols in the sizes of a value."""
    sizes: list[Any] = [val]
    if isinstance(val, torch.Tensor):
        sizes = [*val.shape, *val.stride(), val.storage_offset()]
    elif isinstance(val, (list, tuple)):
        return {name for one in val for name in symbols(one)}
    return {str(s) for n in sizes if isinstance(n, torch.SymInt) for s in size_symbols(n)}
