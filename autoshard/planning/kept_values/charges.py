"""What the planner charges a plan, apart from the prices of bytes under which it was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autoshard.planning.decisions import Decisions
from autoshard.planning.prices import AxisPrices
from autoshard.planning.problem import Problem
from autoshard.planning.strategy import operands
from autoshard.runtime.collectives import State


@dataclass(frozen=True)
class Charged:
    """seconds: of a step, at the prices that were given. held: bytes of what trains the weights,
    and of those that are gathered and kept."""

    seconds: float
    held: float


def charged(problem: Problem, prices: AxisPrices, plan: Decisions) -> Charged | None:
    """What `problem`, at its `prices`, charges a plan that may have been made at others: values
    take the ways and weights are gathered as often as they are there. None where the plan is none
    of the problem's, or weights have choices on dp_shard or ep, whose bytes have no one price."""
    if prices.batch is not None or problem.stacks:
        return None
    try:
        seconds = sum(_variables(problem, plan))
    except ValueError:
        return None
    held = 0.0
    for node, state in plan.stored.items():
        held += prices.storage(node, state) / prices.parameter_byte
    for source, have, want in _changes(problem, plan):
        seconds += prices.change(have, want, prices.moved(source))
        weight = prices.gathered(source, have, want)
        if weight is not None:
            nbytes, again = weight
            kept = nbytes * prices.parameter_byte
            repeats = plan.prices.gathers_again(source, have, want)
            seconds += (again if repeats else kept) - min(again, kept)
            held += 0 if repeats else nbytes
    return Charged(seconds, held)


def _variables(problem: Problem, plan: Decisions) -> Iterator[float]:
    """Seconds of each operator by itself, and of each output. Raises ValueError where the plan has
    what the problem does not offer."""
    unary = problem.graph.unary
    for node, variable in problem.variables.items():
        yield float(unary[variable][problem.domains[node].index(plan.strategies[node])])
    for entry, state in zip(problem.outputs, plan.outputs, strict=True):
        if entry is not None:
            yield float(unary[entry[0]][entry[1].index(state)])


def _changes(problem: Problem, plan: Decisions) -> Iterator[tuple[fx.Node, State, State]]:
    """Each change of state that is charged."""
    reads = [
        (source, want)
        for node in problem.variables
        for source, want in zip(operands(node), plan.strategies[node].inputs)
    ]
    (results,) = next(iter(reversed(next(iter(problem.variables)).graph.nodes))).args
    ends = zip(results, problem.outputs, plan.outputs, strict=True)  # type: ignore[arg-type]
    reads += [(result, state) for result, entry, state in ends if entry is not None]
    for source in dict.fromkeys(source for source, _ in reads):
        if (copy := plan.copies.get(source)) is not None:
            yield source, plan.state(source), copy
    for source, want in reads:
        have, copy = plan.state(source), plan.copies.get(source)
        if want != copy:
            route = plan.route(source, want)
            yield source, copy if len(route) > 1 and copy else have, want
