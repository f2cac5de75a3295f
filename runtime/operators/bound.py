"""A function with some keyword arguments fixed, usable as the target of a graph node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
