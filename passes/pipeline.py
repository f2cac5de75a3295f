"""The order of the passes, in one literal tuple, and the only code that runs them."""

from __future__ import annotations

from typing import Any

from torch import fx

from autoshard.passes.base import Context, Pass, Report
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.passes.invariant_random import InvariantRandom
from autoshard.passes.normalize import Normalize
from autoshard.runtime.axis import Axis

# Before planning, on the serial graph. `localize` then rewrites it to one rank's program.
BEFORE_PLANNING: tuple[Pass, ...] = (
    Normalize(),
    ExpandGroupedHeads(),
    InvariantRandom(),
)


def prepare(
    gm: fx.GraphModule, axis: Axis, config: Any = None
) -> tuple[fx.GraphModule, list[Report]]:
    """Run the passes that precede planning, in place; reports in the order of the passes."""
    reports = []
    for one in BEFORE_PLANNING:
        reports.append(one.run(gm, Context(axis, config)))
        gm.graph.lint()
    gm.recompile()
    return gm, reports
