"""What the planner charges a plan, apart from the prices of bytes under which it was made."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from torch import fx

from autoshard.planning.decisions import Decisions
from autoshard.planning.kept_values.held_weights import held_weights, read_once
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
    of the problem's, or several operators read a stack that ep may leave where it is."""
    if not read_once(problem):
        return None
    prices = copy(prices)
    prices.parts = plan.prices.parts
    try:
        seconds = sum(_variables(problem, plan))
        weights = list(held_weights(problem, prices, plan.strategies, plan.weights))
    except (KeyError, ValueError):
        return None
    seconds += sum(one.more for one in weights)
    held = sum(one.held for one in weights)
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
        if (shared := plan.copies.get(source)) is not None:
            yield source, plan.state(source), shared
    for source, want in reads:
        have, shared = plan.state(source), plan.copies.get(source)
        if want != shared:
            route = plan.route(source, want)
            yield source, shared if len(route) > 1 and shared else have, want
