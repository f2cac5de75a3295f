"""The order of the passes, in one literal tuple, and the only code that runs them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import fx

from autoshard.passes.all_reduce_by_all_gather import AllReduceByAllGather
from autoshard.passes.base import SILENT, Context, Pass, Report, Watch
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.bucket_parameters import BucketParameters
from autoshard.passes.canonicalize import Canonicalize
from autoshard.passes.chunk_loss import ChunkLoss
from autoshard.passes.data_parallel import DataParallel
from autoshard.passes.delay_weight_products import DelayWeightProducts
from autoshard.passes.exchange_experts import ExchangeExperts
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.passes.float8_products import Float8Products
from autoshard.passes.fuse_collectives import FuseCollectives
from autoshard.passes.fuse_inference_layers import FuseInferenceLayers
from autoshard.passes.global_token_mean import GlobalTokenMean
from autoshard.passes.invariant_random import InvariantRandom
from autoshard.passes.keep_on_host import keep_on_host
from autoshard.passes.localize import Localize
from autoshard.passes.match_experts import MatchExperts
from autoshard.passes.number_draws import NumberDraws
from autoshard.passes.recover_masks import RecoverMasks
from autoshard.passes.reduce_scatter_by_all_to_all import ReduceScatterByAllToAll
from autoshard.passes.save_bases import save_bases
from autoshard.passes.schedule_collectives import ScheduleCollectives
from autoshard.passes.shift_labels import ShiftLabels
from autoshard.passes.split_recurrent import SplitRecurrent
from autoshard.passes.unflatten_losses import UnflattenLosses
from autoshard.passes.unflatten_products import UnflattenProducts
from autoshard.runtime.collectives import Axis, gathering_axes
from autoshard.runtime.mesh import Mesh


class Stage(NamedTuple):
    """The passes over one kind of graph, in the order in which they run.

    pairs: rewrites of a forward and its backward together, in place, called with how many results
    of the forward are not kept for backward.
    """

    name: str
    passes: tuple[type[Pass], ...] = ()
    pairs: tuple[Callable[[fx.GraphModule, fx.GraphModule, int], Any], ...] = ()


PIPELINE = (
    # the serial graph, before it is planned
    Stage(
        "serial",
        (
            *(Canonicalize, RecoverMasks, ExpandGroupedHeads, SplitRecurrent, MatchExperts),
            *(InvariantRandom, UnflattenProducts, Float8Products, ShiftLabels, UnflattenLosses),
        ),
    ),
    # the planned serial graph, which the first pass makes one rank's
    Stage(
        "local",
        (
            *(Localize, ExchangeExperts, DataParallel, GlobalTokenMean),
            *(FuseInferenceLayers, ChunkLoss, NumberDraws),
        ),
    ),
    # a forward and a backward together, as AOTAutograd has cut them
    Stage("cut", pairs=(save_bases, keep_on_host)),
    # the forward graph and the backward graph that AOTAutograd makes of it
    Stage(
        "graphs",
        (
            *(BucketParameters, FuseCollectives, DelayWeightProducts),
            *(BucketGradients, ScheduleCollectives),
        ),
    ),
    # the same where they are compiled and run: `Program.collectives` lists those before
    Stage("run", (ReduceScatterByAllToAll, AllReduceByAllGather)),
)

_EVERY = [one for stage in PIPELINE for one in stage.passes]

ORDER = tuple(one.name for one in _EVERY)
"""The name of every pass, as a program meets them: what AUTOSHARD_STOP_AFTER counts by."""

OPTIONAL = tuple(one.name for one in _EVERY if one.optional)
"""Passes without which a program is as right, only slower; AUTOSHARD_DISABLE takes no others."""


def run_stage(
    name: str,
    passes: Sequence[Pass],
    gm: fx.GraphModule,
    ctx: Context,
    watch: Watch = SILENT,
    phase: str = "",
    stages: Sequence[Stage] = PIPELINE,
) -> list[Report]:
    """Run passes of one stage over a graph, in place and in its order; reports of those that ran.

    stages: those that the stage is one of. Raises ValueError for a pass of another stage.
    """
    order = next(stage.passes for stage in stages if stage.name == name)
    if strange := [one.name for one in passes if type(one) not in order]:
        raise ValueError(
            f"{', '.join(strange)} in the stage {name!r}, "
            f"whose passes are {', '.join(one.name for one in order)}"
        )
    reports = []
    for one in sorted(passes, key=lambda one: order.index(type(one))):
        if watch.runs(one.name):
            watch.before(one.name, gm, phase)
            reports.append(one.run(gm, ctx))
            gm.graph.lint()
            watch.after(one.name, gm, reports[-1], phase)
    gm.recompile()
    return reports


def prepare(
    gm: fx.GraphModule, axis: Axis, passes: Sequence[Pass], watch: Watch = SILENT
) -> list[Report]:
    """Run the passes that precede planning, in place."""
    return run_stage("serial", passes, gm, Context(axis), watch)


def rank_program(
    serial: fx.GraphModule, passes: Sequence[Pass], axis: Axis, watch: Watch = SILENT
) -> tuple[fx.GraphModule, list[Report]]:
    """The program of one rank, by `Localize` and those after it; the serial graph stays."""
    local = copy.copy(serial)  # shares the graph until Localize gives it one of its own
    local.meta = dict(serial.meta)
    reports = run_stage("local", passes, local, Context(axis), watch)
    serial.graph.owning_module = serial
    return local, reports


def exchange(local: fx.GraphModule, experts: ExchangeExperts, planned: Axis) -> Report:
    """Have rows travel to experts in the graph of a rank of `planned`, in place."""
    (report,) = run_stage("local", [experts], local, Context(planned))
    return report


def after_cut(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Rewrite both graphs of a step, as soon as they are cut. results: see `Stage`."""
    for stage in PIPELINE:
        for rewrite in stage.pairs:
            rewrite(forward, backward, results)


def finish(
    gm: fx.GraphModule,
    mesh: Mesh,
    bucket_bytes: int | None,
    backward: bool,
    watch: Watch = SILENT,
    fuse: FuseCollectives | None = None,
) -> list[Report]:
    """Fuse, bucket and schedule the collectives of one of AOTAutograd's graphs, in place.

    fuse: the pass that joins those of activations to products, where any are to be. A gradient is
    reduced on the planned axis first, where its weight was used as R, then over those that its
    weight was gathered on, the inner one before the outer one.
    """
    axis = mesh.planned
    axes = (axis, *reversed(gathering_axes(mesh.axes)))
    groups = tuple(one.group for one in axes if one.size > 1)
    passes: list[Pass] = [
        BucketParameters(bucket_bytes, axis.group if backward and axis.name == "tp" else ""),
        ScheduleCollectives(bucket_bytes=bucket_bytes),
    ]
    if fuse is not None:
        passes.append(fuse)
    if backward:
        passes.append(BucketGradients(groups, bucket_bytes))
        if axis.size > 1:
            passes.append(DelayWeightProducts())
    phase = "backward" if backward else "forward"
    return run_stage("graphs", passes, gm, Context(axis), watch, phase)


def specialize(
    gm: fx.GraphModule, axis: Axis, backward: bool, watch: Watch = SILENT
) -> list[Report]:
    """Do each collective of a graph that is compiled and run the way its backend does it best."""
    phase = "backward" if backward else "forward"
    passes = (ReduceScatterByAllToAll(), AllReduceByAllGather())
    return run_stage("run", passes, gm, Context(axis), watch, phase)
