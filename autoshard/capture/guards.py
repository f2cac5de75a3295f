"""Guards on symbolic sizes that a plan shards: another remainder is another program."""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any

import torch
from torch import fx

from autoshard.planning import value
from autoshard.runtime import compat
from autoshard.runtime.collectives import shard_dim

# By code object: sizes (source, dim) of inputs that decide a size which some graph shards.
_split_sizes: weakref.WeakKeyDictionary[CodeType, set[tuple[str, int]]]
_split_sizes = weakref.WeakKeyDictionary()


def guard_divisible(
    serial: fx.GraphModule,
    strategies: dict[fx.Node, Any],
    state: Any,
    n: int,
    inputs: list[compat.GraphInput],
) -> None:
    """Make Dynamo guard that the axis divides every symbolic size the plan shards.

    Evaluating `size % n == 0` on the traced symbol records the guard; a length that n does not
    divide then compiles its own variant instead of getting a wrong answer. That variant guards
    that n does not divide: it would else serve every length from then on, unsharded.
    """
    sizes = {
        (item.source, dim): extent
        for item in inputs
        if isinstance(item.fake, torch.Tensor)
        for dim, extent in enumerate(item.fake.shape)
        if not isinstance(extent, int)
    }
    code = compat.compiled_code()
    known = set() if code is None else _split_sizes.setdefault(code, set())
    for key, size in sizes.items():
        if key in known:
            bool(size % n == 0)
    for node in serial.graph.nodes:
        val = value(node)
        if node not in strategies or not isinstance(val, torch.Tensor):
            continue
        dim = shard_dim(state(node))
        extent: Any = 0 if dim is None else val.shape[dim]
        if not isinstance(extent, int):
            if not bool(extent % n == 0):
                raise AssertionError(f"{node.name}: planned S({dim}) of {extent} on {n}")
            symbols = compat.size_symbols(extent)
            known.update(k for k, size in sizes.items() if compat.size_symbols(size) & symbols)
