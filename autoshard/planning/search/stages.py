"""Stages of a graph: where it may be cut, and what stages give up for time, less memory for more
seconds.

Where a pipeline is cut is decided before the stages are there to be asked. Layers are alike, so a
stage that keeps a part of its values is taken to compute as large a part of its forward again as
the whole graph does (`part_trade`). Stages of one rank that are there choose together
(`JoinedChoices`).
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions, Recomputation, value_text
from autoshard.planning.estimate import Frontier, Point, frontier, segments_of
from autoshard.planning.strategy import value
from autoshard.planning.values import producer

_MOST_STEPS = 32


def crossing(nodes: Sequence[fx.Node], own: Container[fx.Node]) -> list[list[fx.Node]]:
    """The values that cross a cut before each node, in the order in which they are made. own: those
    that are sent, where a later one of `nodes` reads them: others each stage makes, and results
    stay where they are made."""
    position = {node: i for i, node in enumerate(nodes) if node.op != "output"}
    found: list[list[fx.Node]] = [[] for _ in range(len(nodes) + 1)]
    for i, node in enumerate(nodes):
        if node in own:
            last = max((position[user] for user in node.users if user in position), default=i)
            for cut in range(i + 1, last + 1):
                found[cut].append(node)
    return found


def places(nodes: Sequence[fx.Node], crossing: Sequence[Sequence[fx.Node]]) -> list[int]:
    """The positions where a cut may be: before an operator, where what crosses it are tensors."""
    return [
        i
        for i in range(1, len(nodes))
        if nodes[i].op == "call_function"
        and producer(nodes[i])[0] is nodes[i]
        and all(isinstance(value(node), torch.Tensor) for node in crossing[i])
    ]


def cheap_places(sent: Mapping[int, int], most: int) -> list[int]:
    """At most so many of the places at which cuts may be: those that send least. sent: bytes."""
    if len(sent) <= most:
        return list(sent)
    limit = sorted(sent.values())[most // 2]
    few = [i for i, nbytes in sent.items() if nbytes <= limit]
    return few[:: math.ceil(len(few) / most)]  # of equal ones, from all of the graph


@dataclass(frozen=True)
class PartTrade:
    """kept: bytes of each value, by `value_text`, where nothing that takes time is computed again.
    steps: as `Chain.again` has them, with the seconds for one of the forward."""

    kept: dict[str, int]
    steps: tuple[tuple[float, float, float], ...]


def part_trade(gm: fx.GraphModule, decisions: Decisions, n: int, cluster: Cluster) -> PartTrade:
    """What a planned graph gives up on a rank of an axis of `n`. Of its last segment nothing: that
    is the loss, which one stage has."""
    choices = frontier(gm, decisions, n, cluster)
    values, points = choices.values, choices.points
    if not points:
        return PartTrade({}, ())
    kept = {value_text(one.key): nbytes for one, nbytes, _ in choices.kept()}
    segments = segments_of(values)
    last = sum(kept[value_text(v.key)] for v, s in zip(values, segments) if s == segments[-1])
    forward, most = sum(one.seconds for one in values), points[0].kept - last
    if forward <= 0 or most <= 0:
        return PartTrade(kept, ())
    few = points[1 :: max(1, len(points) // _MOST_STEPS)]
    return PartTrade(
        kept,
        tuple(
            ((one.kept - last) / most, one.peak - one.kept, one.seconds / forward)
            for one in [*few, *points[-1:]]
        ),
    )


class JoinedChoices:
    """Parts of which each has choices of its own, by rising time and falling memory of all.

    steps: for each, the point of each part; from one to the next the part changes that spares most
    bytes for its time. estimates: bytes of each step.
    """

    def __init__(self, parts: Sequence[Frontier]) -> None:
        self.parts = [part for part in parts if part.points]
        self.steps = _steps(self.parts)
        self.estimates = [sum(one.peak for one in self.points(i)) for i in range(len(self.steps))]

    def points(self, index: int) -> list[Point]:
        return [part.points[at] for part, at in zip(self.parts, self.steps[index])]

    def recomputations(self, index: int) -> list[Recomputation]:
        """The choices of a step."""
        return [part.recomputation(at) for part, at in zip(self.parts, self.steps[index])]

    def cheapest(self, peak: int) -> int | None:
        """The index of the quickest step whose estimate is at most `peak` bytes; None: there is
        none. Of those that take as long, the smallest."""
        found = next((i for i, one in enumerate(self.estimates) if one <= peak), None)
        if found is not None and len(self.parts) == 1:
            return self.parts[0].cheapest(peak)
        return found


def _steps(parts: Sequence[Frontier]) -> list[tuple[int, ...]]:
    at, rates = [0] * len(parts), list[tuple[float, int]]()
    for number, part in enumerate(parts):
        steepest = float("inf")
        for before, after in pairwise(part.points):
            rate = (before.peak - after.peak) / max(after.seconds - before.seconds, 1e-15)
            steepest = min(steepest, rate)  # points follow each other, whatever their rates
            rates.append((-steepest, number))
    found = [tuple(at)]
    for _, number in sorted(rates, key=lambda one: one[0]):
        at[number] += 1
        found.append(tuple(at))
    return found
