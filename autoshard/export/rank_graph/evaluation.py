"""Values of a rank graph that sizes and constants decide, computed without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.runtime import compat

aten = torch.ops.aten


class Unknown(Exception):
    """A value depends on what only the caller knows."""


def computed(
    node: fx.Node,
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    known: dict[fx.Node, Any],
) -> Any:
    """The value of a node that `constants` and `sizes`, by symbol, decide; Unknown otherwise.

    known: values that are known already, by node; what is computed is added.
    """
    if node in known:
        return known[node]
    if node.op == "placeholder":
        if str(node.target) not in constants:
            raise Unknown
        known[node] = constants[str(node.target)]
    elif node.target is aten.sym_size.int:
        known[node] = size_of(node.meta["val"], sizes)
    elif getattr(node.target, "namespace", "aten") != "aten":
        raise Unknown
    else:
        args, kwargs = fx.node.map_arg(
            (node.args, dict(node.kwargs)), lambda n: computed(n, constants, sizes, known)
        )
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def size_of(extent: Any, sizes: Mapping[str, int]) -> int:
    """The number that a size, an expression of the symbols of `sizes`, becomes."""
    if isinstance(extent, int):
        return extent
    known = {symbol: sizes.get(str(symbol)) for symbol in compat.size_symbols(extent)}
    if None in known.values():
        raise Unknown
    return int(compat.size_expression(extent).subs(known))
