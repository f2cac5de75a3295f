"""The order of the passes, in one literal tuple, and the only code that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autoshard.passes.base import Context, Pass, Report
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.bucket_parameters import BucketParameters
from autoshard.passes.exchange_scatter import ExchangeScatter
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.passes.invariant_random import InvariantRandom
from autoshard.passes.normalize import Normalize
from autoshard.passes.schedule_collectives import ScheduleCollectives
from autoshard.passes.split_recurrent import SplitRecurrent
from autoshard.runtime.axis import Axis
from autoshard.runtime.data_axes import data_axes
from autoshard.runtime.mesh import Mesh

# Before planning, on the serial graph. `localize` then rewrites it to one rank's program.
BEFORE_PLANNING: tuple[Pass, ...] = (
    Normalize(),
    ExpandGroupedHeads(),
    SplitRecurrent(),
    InvariantRandom(),
)

# On a graph that is compiled and run; the collectives of a Program are those before.
BEFORE_COMPILATION: tuple[Pass, ...] = (ExchangeScatter(),)


def finish(
    gm: fx.GraphModule, mesh: Mesh, config: Any, backward: bool, run: bool = False
) -> list[Report]:
    """Run the passes over one of AOTAutograd's graphs, in place.

    run: the graph is compiled and run, and each collective is done the way its backend does best.
    """
    passes = after_autograd(mesh, config, backward)
    reports = _run(passes, gm, mesh, config)
    return [*reports, *(before_compilation(gm, mesh, config) if run else ())]


def before_compilation(gm: fx.GraphModule, mesh: Mesh, config: Any) -> list[Report]:
    """The passes of `finish` over a graph that is compiled and run, in place."""
    return _run(BEFORE_COMPILATION, gm, mesh, config)


def _run(passes: Sequence[Pass], gm: fx.GraphModule, mesh: Mesh, config: Any) -> list[Report]:
    reports = []
    for one in passes:
        reports.append(one.run(gm, Context(mesh.axis("tp"), config)))
        gm.graph.lint()
    gm.recompile()
    return reports


def after_autograd(mesh: Mesh, config: Any, backward: bool) -> tuple[Pass, ...]:
    """The passes over the forward or the backward graph, in order.

    A gradient is reduced on tp first, where its weight was used as V, then over the
    data-parallel axes, the inner one before the outer one.
    """
    axes = [mesh.axis("tp"), *reversed(data_axes(mesh.axes))]
    groups = tuple(axis.group for axis in axes if axis.size > 1)
    return (
        BucketParameters(config.bucket_bytes, mesh.axis("tp").group if backward else ""),
        *((BucketGradients(groups, config.bucket_bytes),) if backward else ()),
        ScheduleCollectives(bucket_bytes=config.bucket_bytes),
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
