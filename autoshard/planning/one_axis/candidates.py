"""Plans for a rank that is short of memory: at dearer bytes, and together with what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import fx

from autoshard.planning.asked import Request, constrain
from autoshard.planning.cost import Hardware, planned_on
from autoshard.planning.decisions import Decisions
from autoshard.planning.kept_values import KeptBefore, KeptSearch
from autoshard.planning.one_axis.builder import builder_of
from autoshard.planning.one_axis.solution import solve
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem

PlanPrice = TypeVar("PlanPrice")

_PLACEMENTS, _HIGHEST = 3, 1e-6
"""Prices of a byte at which placements are tried; at the highest a gigabyte costs a thousand
seconds a step."""


def at_dearer_bytes(
    gm: fx.GraphModule, n: int, request: Request, default: Decisions
) -> Iterator[Decisions]:
    """Plans at rising prices of a byte, for a rank that has less memory than `default` takes; the
    same for every layout whose weights have no choice."""
    hardware = default.hardware
    for price in dearer(default.prices.parameter_byte):
        yield solve(gm, n, hardware, request, of_a_byte(price, hardware, request))


def dearer(byte: float) -> Iterator[float]:
    """Rising prices of a byte, above that without a budget."""
    for step in range(1, _PLACEMENTS + 1):
        yield byte * (_HIGHEST / byte) ** (step / _PLACEMENTS)


def with_kept_values(
    gm: fx.GraphModule,
    n: int,
    request: Request,
    default: Decisions,
    price: Callable[[Decisions], PlanPrice],
    fits: Callable[[PlanPrice], bool],
    apart: Sequence[Decisions] = (),
    before: KeptBefore | None = None,
) -> Iterator[PlanPrice]:
    """Plans for such a rank whose placements and kept values are decided together, at the prices of
    a bisection.

    price: decides what each computes again, and leaves it in its `recomputation`; fits: whether it
    stays within the memory of a rank of `request.layout`. apart: plans whose placements were
    decided by themselves; all are told what is known of the others. before: as of `KeptSearch`.
    """
    hardware, plans = default.hardware, list(apart)
    cluster, host = planned_on(hardware), bool(request.host_memory)
    # with choices on dp_shard bytes are those of a rank
    shard = 1 if request.layout.chooses else request.layout.shard
    search = KeptSearch(gm, default, n, cluster, shard, host, before)

    def made(prices: Prices) -> Decisions:
        plans.append(solve(gm, n, hardware, request, prices, search=search))
        return plans[-1]

    yield from search.run(made, price, fits)

    def problem(prices: Prices) -> tuple[Problem, AxisPrices]:
        builder = builder_of(gm, n, hardware, request, prices)
        built = builder.build()
        if request.plan:
            constrain(gm, built, request.plan)
        return built, builder.prices

    search.tell(plans, problem)


def of_a_byte(price: float, hardware: Hardware, request: Request) -> Prices:
    """The prices at which a stored byte costs so much, and one that passes through memory no
    less."""
    least = 2.0 / hardware.memory_bandwidth
    spreads = request.prices.spreads_batch
    return Prices(price, max(price, least), spreads_batch=spreads)
