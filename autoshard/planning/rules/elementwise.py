"""Elementwise operators: any dim shards, whatever the number of operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autoshard.planning.rules.call import OpCall
from autoshard.planning.rules.language import TextRule, tensor_arguments
from autoshard.planning.strategy import Strategy


def elementwise(call: OpCall) -> Iterable[Strategy]:
    """The rule of an operator with torch.Tag.pointwise: every operand broadcasts to the result."""
    count = len(tensor_arguments(call.schema))
    rule = TextRule(", ".join(["..."] * count) + " -> " + ", ".join(["..."] * len(call.results)))
    return rule(call)


def when_zero(argument: str, text: str, otherwise: str) -> Callable[[OpCall], Iterable[Strategy]]:
    """A rule that holds where a number is zero (a fill value), and another for the rest."""
    zero, rest = TextRule(text), TextRule(otherwise)

    def rule(call: OpCall) -> Iterable[Strategy]:
        return (zero if call[argument] in (None, 0) else rest)(call)

    return rule
