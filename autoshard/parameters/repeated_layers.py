"""Layers compiled one by one: the plan of the first gives the states of the others.

`for layer in model.layers: layer.compile(backend="autoshard")` makes one graph, which serves every
layer whose parameters are stored as those of the first are. So they are stored with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

T = TypeVar("T")


def parameters_of_repeats(
    planned: Mapping[nn.Parameter, T], models: Sequence[nn.Module]
) -> dict[nn.Parameter, T]:
    """The parameters of a class's other modules that correspond to planned ones of the first.

    planned: what one graph read. The first is the smallest module of one of `models` that holds
    them; the others are of its class, and each such parameter has the shape and dtype of the
    planned one. The same on every rank.
    """
    found: dict[nn.Parameter, T] = {}
    for model in models:
        names = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter in planned
        }
        path = ".".join(_common([name.split(".")[:-1] for name in names]))
        if not path:
            continue
        first = model.get_submodule(path)
        for other in model.modules():
            if type(other) is not type(first) or other is first:
                continue
            own = dict(other.named_parameters(remove_duplicate=False))
            for name, parameter in names.items():
                its = own.get(name.removeprefix(f"{path}."))
                if its is not None and its not in planned and _alike(its, parameter):
                    found.setdefault(its, planned[parameter])
    return found


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The longest prefix of all paths."""
    found: list[str] = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return found


def _alike(a: nn.Parameter, b: nn.Parameter) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
