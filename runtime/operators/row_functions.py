"""What stands between a product and its loss, as text: functions of each number of the logits.

An operator takes no functions but strings: a JSON list of [name, *arguments], in their order.

    [["div", 30.0], ["tanh"], ["mul", 30.0], ["to", "float32"]]     the softcap of Gemma 2

Each has its derivative beside it: inside an operator autograd records nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

RowFunction = tuple[Any, ...]
"""(name, *arguments)"""


class _Derivable(NamedTuple):
    """apply(x, *arguments). pull(gradient of the result, result, *arguments): that of x. keeps:
    whether `pull` reads the result."""

    apply: Callable[..., Tensor]
    pull: Callable[..., Tensor]
    keeps: bool = False


def _cut(x: Tensor, start: int, end: int, classes: int) -> Tensor:
    return x[:, start:end]


def _padded(gradient: Tensor, _: None, start: int, end: int, classes: int) -> Tensor:
    return torch.nn.functional.pad(gradient, (start, classes - end))


_FUNCTIONS = {
    "to": _Derivable(lambda x, dtype: x.to(getattr(torch, dtype)), lambda g, _, dtype: g),
    "mul": _Derivable(lambda x, a: x * a, lambda g, _, a: g * a),
    "div": _Derivable(lambda x, a: x / a, lambda g, _, a: g / a),
    "add": _Derivable(lambda x, a: x + a, lambda g, _, a: g),
    "sub": _Derivable(lambda x, a: x - a, lambda g, _, a: g),
    "tanh": _Derivable(torch.tanh, torch.ops.aten.tanh_backward.default, keeps=True),
    # of a vocabulary that was padded: classes from start to end of so many
    "cut": _Derivable(_cut, _padded),
}


_KEEPING = frozenset(name for name, one in _FUNCTIONS.items() if one.keeps)
"""Names of those of which a result is kept for the derivative."""


def as_text(functions: Sequence[RowFunction]) -> str:
    """The text of functions."""
    return json.dumps(functions)


def parsed(text: str) -> list[RowFunction]:
    """The functions of a text."""
    return [tuple(one) for one in json.loads(text)]


class Applied(NamedTuple):
    """Functions applied to a chunk of logits. result: what they make of it."""

    functions: Sequence[RowFunction]
    result: Tensor
    kept: Sequence[Tensor | None]
    dtypes: Sequence[torch.dtype]

    @property
    def keeps_result(self) -> bool:
        """Whether `pull` reads the result, which then must not be written to."""
        return bool(self.kept) and self.kept[-1] is not None

    def pull(self, gradient: Tensor) -> Tensor:
        """The gradient of what they were applied to, of that of the result."""
        for one, kept, dtype in zip(
            reversed(self.functions), reversed(self.kept), reversed(self.dtypes)
        ):
            name, *arguments = one
            gradient = _FUNCTIONS[name].pull(gradient, kept, *arguments).to(dtype)
        return gradient


def apply(x: Tensor, functions: Sequence[RowFunction]) -> Applied:
    """x: [rows, classes]."""
    kept: list[Tensor | None] = []
    dtypes = []
    for name, *arguments in functions:
        dtypes.append(x.dtype)
        x = _FUNCTIONS[name].apply(x, *arguments)
        kept.append(x if _FUNCTIONS[name].keeps else None)
    return Applied(functions, x, kept, dtypes)


def result_dtype(dtype: torch.dtype, functions: Sequence[RowFunction]) -> torch.dtype:
    """The dtype of what functions make of values of `dtype`."""
    casts = [one[1] for one in functions if one[0] == "to"]
    return getattr(torch, casts[-1]) if casts else dtype


def kept_by(functions: Sequence[RowFunction]) -> int:
    """How many results of functions their derivatives read."""
    return sum(one[0] in _KEEPING for one in functions)


def copies_of(functions: Sequence[RowFunction]) -> int:
    """How many values of a chunk's size there are beside its scores, while functions are applied
    and their derivatives are waited for."""
    return bool(functions) + kept_by(functions)
