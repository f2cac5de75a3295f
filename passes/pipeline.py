"""The order of the passes, in one literal tuple, and the only code that runs them."""

from __future__ import annotations

from typing import Any

from torch import fx

from autoshard.passes.base import SILENT, Context, Pass, Report, Watch
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.bucket_parameters import BucketParameters
from autoshard.passes.exchange_scatter import ExchangeScatter
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.passes.invariant_random import InvariantRandom
from autoshard.passes.normalize import Normalize
from autoshard.passes.schedule_collectives import ScheduleCollectives
from autoshard.passes.split_recurrent import SplitRecurrent
from autoshard.runtime.collectives import Axis, data_axes
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

# The name of every pass, in the order in which a program meets them: what AUTOSHARD_STOP_AFTER
# counts by.
ORDER = (
    "normalize",
    "expand_grouped_heads",
    "split_recurrent",
    "invariant_random",
    "localize",
    "data_parallel",
    "weigh_tokens",
    "bucket_parameters",
    "bucket_gradients",
    "schedule_collectives",
    "exchange_scatter",
)

# Those without which a program is as right, only slower; AUTOSHARD_DISABLE takes no other.
OPTIONAL = (
    "expand_grouped_heads",
    "bucket_parameters",
    "bucket_gradients",
    "schedule_collectives",
    "exchange_scatter",
)


def run_passes(
    passes: tuple[Pass, ...],
    gm: fx.GraphModule,
    ctx: Context,
    watch: Watch = SILENT,
    phase: str = "",
) -> list[Report]:
    """Run passes over one graph, in place; the reports of those that ran."""
    reports = []
    for one in passes:
        if watch.runs(one.name):
            watch.before(one.name, gm, phase)
            reports.append(one.run(gm, ctx))
            gm.graph.lint()
            watch.after(one.name, gm, reports[-1], phase)
    gm.recompile()
    return reports


def finish(
    gm: fx.GraphModule,
    mesh: Mesh,
    config: Any,
    backward: bool,
    watch: Watch = SILENT,
    run: bool = False,
) -> list[Report]:
    """Run the passes over one of AOTAutograd's graphs, in place.

    run: the graph is compiled and run, and each collective is done the way its backend does best.
    """
    passes = after_autograd(mesh, config, backward)
    phase = "backward" if backward else "forward"
    last = BEFORE_COMPILATION if run else ()
    return run_passes((*passes, *last), gm, Context(mesh.axis("tp"), config), watch, phase)


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
    gm: fx.GraphModule, axis: Axis, config: Any = None, watch: Watch = SILENT
) -> tuple[fx.GraphModule, list[Report]]:
    """Run the passes that precede planning, in place; reports in the order of the passes."""
    return gm, run_passes(BEFORE_PLANNING, gm, Context(axis, config), watch)
