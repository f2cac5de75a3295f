"""Plans for a rank that is short of memory: at dearer bytes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autoshard.planning.asked import Request
from autoshard.planning.cost import Machine
from autoshard.planning.decisions import Decisions
from autoshard.planning.one_axis.solution import solve
from autoshard.planning.prices import Prices

_PLACEMENTS, _HIGHEST = 3, 1e-6
"""Prices of a byte at which placements are tried; at the highest a gigabyte costs a thousand
seconds a step."""


def at_dearer_bytes(
    gm: fx.GraphModule, n: int, request: Request, default: Decisions
) -> Iterator[Decisions]:
    """Plans at rising prices of a byte, for a rank that has less memory than `default` takes; the
    same for every layout whose weights have no choice."""
    machine = default.machine
    for price in dearer(default.prices.parameter_byte):
        yield solve(gm, n, machine, request, of_a_byte(price, machine, request))


def dearer(byte: float) -> Iterator[float]:
    """Rising prices of a byte, above that without a budget."""
    for step in range(1, _PLACEMENTS + 1):
        yield byte * (_HIGHEST / byte) ** (step / _PLACEMENTS)


def of_a_byte(price: float, machine: Machine, request: Request) -> Prices:
    """The prices at which a stored byte costs so much, and one that passes through memory no
    less."""
    least = 2.0 / machine.device.memory_bandwidth
    return Prices(price, max(price, least))
