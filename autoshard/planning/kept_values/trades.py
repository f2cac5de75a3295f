"""What parts of a graph give up for time, by the frontier of the whole graph.

Where a pipeline is cut is decided before the stages are there to be asked. Layers are alike, so a
stage that keeps a part of its values is taken to compute as large a part of its forward again as
the whole graph does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions, value_text
from autoshard.planning.estimate import frontier, segments_of

_MOST_STEPS = 32


class TradeStep(NamedTuple):
    """part: of the bytes that are kept where nothing that takes time is computed again; beside:
    bytes that are there beside those, at the worst moment; seconds: for one of the forward."""

    part: float
    beside: float
    seconds: float


@dataclass(frozen=True)
class PartTrade:
    """kept: bytes of each value, by `value_text`, where nothing that takes time is computed again.
    steps: by rising seconds."""

    kept: dict[str, int]
    steps: tuple[TradeStep, ...]


def part_trade(gm: fx.GraphModule, decisions: Decisions, n: int, cluster: Cluster) -> PartTrade:
    """What a planned graph gives up on a rank of an axis of `n`. Of its last segment nothing: that
    is the loss, which one stage has."""
    choices = frontier(gm, decisions, n, cluster)
    values, points = choices.values, choices.points
    if not points:
        return PartTrade({}, ())
    kept = {value_text(one.key): nbytes for one, nbytes, _ in choices.kept_at(0)}
    segments = segments_of(values)
    last = sum(kept[value_text(v.key)] for v, s in zip(values, segments) if s == segments[-1])
    forward, most = sum(one.seconds for one in values), points[0].kept - last
    if forward <= 0 or most <= 0:
        return PartTrade(kept, ())
    few = points[1 :: max(1, len(points) // _MOST_STEPS)]
    return PartTrade(
        kept,
        tuple(
            TradeStep((one.kept - last) / most, one.peak - one.kept, one.seconds / forward)
            for one in [*few, *points[-1:]]
        ),
    )
