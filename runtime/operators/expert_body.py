"""The program that each expert runs on its rows, as text that an operator can carry.

The text is JSON, one instruction after the other: [operator, arguments, keyword arguments]. An
argument that begins with % is a value: the result of instruction 3 (%3), or

    %rows    [rows, hidden]  tokens, a row for each expert that a token chose, sorted by expert
    %weight  [rows]          what the router gives each of them
    %owner   [rows]          the expert of each
    %offs    [experts]       where the rows of each expert end
    %s0, ... [experts, ...]  the stacks: matrices and biases of all experts

The last result is [rows, hidden]. Every operator keeps the rows apart: row i of its result depends
on row i of its operands, and on the expert that the row belongs to.
"""

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

ROWS, WEIGHT, OWNER, OFFS, STACK = "%rows", "%weight", "%owner", "%offs", "%s"

ELEMENT = "getitem"
"""The one operator that is Python's: an element of what a split returns."""

PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""The products of rows, sorted by expert, and a stack of matrices: (rows, stack, offs, ...)."""

_DTYPE = "dtype"


@dataclass(frozen=True)
class Instruction:
    """One operator of a body: its name in torch.ops, and arguments as in the module's text."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether it multiplies rows with the matrices of their experts."""
        return self.op in PRODUCTS

    def reads(self) -> list[str]:
        """The values among the arguments."""
        found: list[str] = []
        for argument in (*self.args, *(value for _, value in self.kwargs)):
            each = argument if isinstance(argument, tuple) else (argument,)
            found += [one for one in each if isinstance(one, str) and one.startswith("%")]
        return found


@dataclass(frozen=True)
class Body:
    """The instructions, in order."""

    instructions: tuple[Instruction, ...]

    def text(self) -> str:
        """The text that `parse` reads, the same on every rank."""
        return json.dumps(
            [[one.op, *_written((one.args, dict(one.kwargs)))] for one in self.instructions],
            separators=(",", ":"),
        )

    def run(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        owner: torch.Tensor,
        offs: torch.Tensor,
        stacks: Sequence[torch.Tensor],
        foreign: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last result.

        foreign: bool[rows, 1], the rows behind the last of `offs`, which no expert here computes.
        Products leave them as the memory was, forward and backward, so they are made zero on both
        sides of each: before it for the gradient, after it for the value. So is the result, to
        which biases may have been added.
        """
        values: dict[str, Any] = {ROWS: rows, WEIGHT: weight, OWNER: owner, OFFS: offs}
        values.update({f"{STACK}{i}": stack for i, stack in enumerate(stacks)})
        for i, one in enumerate(self.instructions):
            args = [_filled(argument, values) for argument in one.args]
            kwargs = {name: _filled(argument, values) for name, argument in one.kwargs}
            if one.is_product and foreign is not None:
                args[0] = args[0].masked_fill(foreign, 0)
            made = _function(one.op)(*args, **kwargs)
            if one.is_product and foreign is not None:
                made = made.masked_fill(foreign, 0)
            values[f"%{i}"] = made
        result: torch.Tensor = values[f"%{len(self.instructions) - 1}"]
        return result if foreign is None else result.masked_fill(foreign, 0)


@lru_cache(maxsize=256)
def parse(text: str) -> Body:
    """The body that `Body.text` wrote."""
    return Body(
        tuple(
            Instruction(op, _read(args), tuple((name, _read(v)) for name, v in kwargs.items()))
            for op, args, kwargs in json.loads(text)
        )
    )


def _function(name: str) -> Callable[..., Any]:
    if name == ELEMENT:
        return operator.getitem
    namespace, packet, overload = name.split(".")
    function: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return function


def _written(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return {_DTYPE: str(argument).removeprefix("torch.")}
    if isinstance(argument, dict):
        return {name: _written(value) for name, value in argument.items()}
    if isinstance(argument, (tuple, list)):
        return [_written(each) for each in argument]
    return argument


def _read(argument: Any) -> Any:
    if isinstance(argument, dict):
        return getattr(torch, argument[_DTYPE])
    if isinstance(argument, list):
        return tuple(_read(each) for each in argument)
    return argument


def _filled(argument: Any, values: dict[str, Any]) -> Any:
    if isinstance(argument, tuple):
        return [_filled(each, values) for each in argument]
    if isinstance(argument, str) and argument.startswith("%"):
        return values[argument]
    return argument
