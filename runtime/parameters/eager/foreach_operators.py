"""Operators on lists of stored tensors: `_foreach_*` and `_fused_*`, an optimizer's whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.parameters.eager.gathering import resolved, unsharded
from autoshard.runtime.parameters.layout import like, part_like


def apply_to_lists(
    cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """`func` on the parts where every list holds tensors placed alike, and numbers of one element.

    A plain tensor beside a stored one that is written to is cut like it; where the list that is
    written to is plain (an average of the model on one device), stored ones are made whole.
    """
    name: str = func.__name__
    first = args[0]
    ours = [type(x) is cls for x in first]
    if any(ours) and not all(ours):
        return _apart(func, ours, args, kwargs)
    with compat.plain_attributes(), torch.no_grad():
        for x in first:
            if not x.dim() and type(x) is cls:
                resolved(x)
        if not any(ours):
            return func(*map(_whole, args), **_values(kwargs, _whole))

        def parts(a: Any) -> Any:
            return [_part(x, of) for x, of in zip(a, first)] if _is_list(a) else _whole(a)

        out = func(*map(parts, args), **_values(kwargs, parts))
        if not name.endswith("_"):
            return [like(x, each) for x, each in zip(first, out)]
        lists = args if name.startswith("_fused") else args[:1]
        increment_version([x for a in lists if _is_list(a) for x in a if type(x) is cls])
        return out


def _apart(func: Any, ours: list[bool], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One call for the stored tensors of the lists, one for the plain ones."""
    results: list[Any] = [None] * len(ours)
    for kind in (True, False):
        at = [i for i, mine in enumerate(ours) if mine is kind]

        def some(a: Any, at: list[int] = at) -> Any:
            return [a[i] for i in at] if isinstance(a, (list, tuple)) and len(a) == len(ours) else a

        out = func(*map(some, args), **_values(kwargs, some))
        for i, each in zip(at, out or ()):
            results[i] = each
    return None if func.__name__.endswith("_") else results


def _values(kwargs: dict[str, Any], fn: Any) -> dict[str, Any]:
    return {key: fn(value) for key, value in kwargs.items()}


def _is_list(a: Any) -> bool:
    return isinstance(a, (list, tuple)) and bool(a) and isinstance(a[0], torch.Tensor)


def _whole(x: Any) -> Any:
    if _is_list(x):
        return [_whole(each) for each in x]
    return unsharded(x) if isinstance(x, DTensor) else x


def _part(x: torch.Tensor, first: DTensor) -> torch.Tensor:
    """The part of `x` that goes with the part of `first`."""
    if not isinstance(x, DTensor):
        return x if x.dim() == 0 or x.shape != first.shape else compat.local_of(part_like(x, first))
    if x.dim() == 0:
        return compat.local_of(resolved(x))
    if (
        compat.spec_of(x) is compat.spec_of(first)
        or compat.spec_of(x).placements == compat.spec_of(first).placements
    ):
        return compat.local_of(x)
    return compat.local_of(part_like(unsharded(x), first))
