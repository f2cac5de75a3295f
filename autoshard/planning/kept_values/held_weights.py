"""What a plan's weights take beside what the planner's problem charges their states by themselves.

With choices on dp_shard the problem charges the least of them, and of stacks that are gathered over
ep the gather. For a plan that was made at other prices each is one straight line of the price of a
byte: its slope is the bytes that a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import fx

from autoshard.planning.mixtures import WEIGHTS
from autoshard.planning.prices import AxisPrices
from autoshard.planning.problem import Problem
from autoshard.planning.strategy import Strategy
from autoshard.planning.values import output_state


class HeldWeight(NamedTuple):
    """more: seconds above those of `AxisPrices.storage`. held: bytes, of vectors the part that is
    charged."""

    more: float
    held: float


def held_weights(
    problem: Problem,
    prices: AxisPrices,
    strategies: Mapping[fx.Node, Strategy],
    choices: Mapping[fx.Node, str] | None = None,
) -> Iterator[HeldWeight]:
    """Each weight of a plan of `problem`. choices: on dp_shard; None: the cheapest. Raises KeyError
    where one is not offered."""
    travels = {
        stack: reader
        for reader, stacks in problem.stacks.items()
        if strategies[reader].on_ep == WEIGHTS
        for stack, _ in stacks
    }
    for node in prices.parameters:
        state, reader = output_state(strategies[node], None), travels.get(node)
        alone, byte = prices.storage(node, state), prices.stored_byte(node)
        of_charge = byte / prices.parameter_byte
        if (batch := prices.batch) is not None:
            away = reader is not None
            choice = choices[node] if choices else batch.choice(node, state, byte, away)
            free, one = (batch.charges(node, state, p, away)[choice] for p in (0.0, 1.0))
            yield HeldWeight(free + (one - free) * byte - alone, (one - free) * of_charge)
            continue
        free = one = 0.0
        if reader is not None and prices.on_ep is not None:
            free, one = (prices.on_ep.gathered(node, reader, state, p) for p in (0.0, 1.0))
        held = alone / prices.parameter_byte + (one - free) * of_charge
        yield HeldWeight(free + (one - free) * byte, held)


def read_once(problem: Problem) -> bool:
    """Whether each stack that ep may leave where it is has one reader: of one with several the
    tables of ep are no sum of what the readers pay."""
    stacks = [stack for found in problem.stacks.values() for stack, _ in found]
    return len(set(stacks)) == len(stacks) and all(len(stack.users) == 1 for stack in stacks)
