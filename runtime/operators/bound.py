"""Targets of graph nodes that run another operator: some arguments fixed, groups
counted on one rank, or the result weighed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.runtime.collectives import Axis


@dataclass(frozen=True)
class Bound:
    """Like functools.partial, but comparable and with the name that fx.Graph asks of a target."""

    function: Callable[..., Any]
    constants: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(function: Callable[..., Any], **constants: Any) -> Bound:
        """`function` with `constants` passed by keyword at each call."""
        return Bound(function, tuple(constants.items()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs, **dict(self.constants))

    @property
    def __name__(self) -> str:
        return self.function.__name__


def unbound(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function itself, and what was bound to it."""
    if type(function) is Bound:
        return function.function, dict(function.constants)
    return function, {}


def with_local_groups(
    *args: Any, op: Callable[..., torch.Tensor], position: int, axis: Axis, **kwargs: Any
) -> torch.Tensor:
    """Run `op` with its group count, the argument at `position`, divided by the axis size."""
    local = list(args)
    local[position] //= axis.size
    return op(*local, **kwargs)


def share_of_mean(
    x: torch.Tensor,
    *args: Any,
    op: Callable[..., torch.Tensor],
    sharded_dim: int,
    extent: int | None,
    axis: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """This rank's part of a mean over the sharded dim; the parts sum to the mean.

    extent: rows of the whole dim; None where it is symbolic, and then in equal shares.
    """
    weight = 1 / axis.size if extent is None else x.shape[sharded_dim] / extent
    return op(x, *args, **kwargs) * weight


def share_of_equal_mean(
    *args: Any, op: Callable[..., torch.Tensor], axis: Axis, **kwargs: Any
) -> torch.Tensor:
    """This rank's part of a mean over equal shares, whatever the operator computes before it."""
    return op(*args, **kwargs) / axis.size
