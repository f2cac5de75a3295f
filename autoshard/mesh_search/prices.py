"""The price of one mesh, from the plan of one size of tp, of cp or of ep."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoshard.building import Planned
from autoshard.errors import PlanError
from autoshard.mesh_search.factorisations import Asked, AxisSizes, refusal
from autoshard.mesh_search.stages import GraphStages, PipelinePrice
from autoshard.planning import Decisions, Plan, Recomputation, is_mixture
from autoshard.planning.chunked_loss import chunks_of
from autoshard.planning.cost import Cluster
from autoshard.planning.estimate import (
    Footprint,
    Frontier,
    HostUpdate,
    Layout,
    OwnedUpdate,
    Profile,
    Timing,
    Training,
    footprint,
    frontier,
    host_update,
    owned_update,
    profile,
    timing,
    with_recomputation,
)

GAIN = 1.01
"""By how much a larger micro-batch must be quicker to be worth its memory."""


@dataclass(frozen=True, kw_only=True)
class MeshPrice:
    """One mesh: what a rank holds and how long a step takes.

    mesh: sizes of the axes above 1. memory, timing: of one rank, bytes and seconds. mfu: the
    model's own operations over what the world's devices could do in a step. unfit: why it does not
    fit, empty where it does. plan: the tp axis's decisions and the mesh, ready to `save`.
    recomputation: what is computed again in backward so that it fits; None: nothing is.
    microbatches: batches of a data-parallel rank that make one step, or of a pipeline, which has as
    many for each of its stages. pipeline: of a mesh with pp,
    whose plan, memory and unfit are those of the mesh of its largest stage. refused: why no model
    runs on the mesh yet, empty where one does. gap: of a mesh with cp and tp, the part of the
    planner's cost by which other plans of the two may be cheaper (`Outer.gap`); None: not known, or
    one axis. host_update: of states on the host, what they hold there and the step takes.
    chunked_losses: how many losses go by chunks of rows. owned: the optimizer's step of matrices
    that have owners. batch: samples of a micro-batch, of a global batch; None: as they were given.
    """

    mesh: AxisSizes
    memory: Footprint
    timing: Timing
    mfu: float
    unfit: str
    plan: Plan
    recomputation: Recomputation | None = None
    microbatches: int = 1
    pipeline: PipelinePrice | None = None
    refused: str = ""
    gap: float | None = None
    host_update: HostUpdate | None = None
    owned: OwnedUpdate = OwnedUpdate()
    chunked_losses: int = 0
    batch: int | None = None

    @property
    def fits(self) -> bool:
        """Whether a rank's memory holds it."""
        return not self.unfit

    def is_quicker(self, smaller: MeshPrice) -> bool:
        """Whether a larger micro-batch is worth its memory."""
        return self.fits and self.mfu > GAIN * smaller.mfu

    @property
    def parts(self) -> dict[str, float]:
        """What a step is made of, for the same work in every row."""
        took, work = self.timing, self.mfu * self.timing.step
        times = 1 if self.pipeline else self.microbatches
        again = times * self.recomputation.seconds if self.recomputation else 0.0
        found = {
            "compute": took.compute - (0.0 if self.pipeline else again),
            "again": again,
            "exposed": took.exposed - (again if self.pipeline else 0.0),
            "idle": took.step - took.compute - took.exposed - took.optimizer,
            "optimizer": took.optimizer,
        }
        return {name: seconds / work for name, seconds in found.items()} if work else found


@dataclass(frozen=True)
class MeshSearch:
    """All meshes tried: `rows`, those that fit first, then by the work a second does. options: of
    `Config`, with which they were."""

    rows: tuple[MeshPrice, ...]
    cluster: Cluster
    world: int
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(rows: Iterable[MeshPrice], machine: Cluster, world: int) -> MeshSearch:
        """These rows in order; of those that differ in the data-parallel axes the first, beside
        pp."""
        # the same work in every row where the batch is; utilisation counts it either way
        found: dict[object, MeshPrice] = {}
        for row in sorted(rows, key=lambda row: (not row.fits, -row.mfu)):
            found.setdefault(_axes(row) if row.pipeline else tuple(row.mesh.items()), row)
        return MeshSearch(tuple(found.values()), machine, world)

    @property
    def best(self) -> MeshPrice | None:
        """The recommendation; None where nothing fits that runs."""
        return next((row for row in self.rows if row.fits and not row.refused), None)

    def reason(self) -> str:
        """Why the recommendation is before the next of other axes, as a sentence; "" where there is
        none of either."""
        best = self.best
        others = [
            row for row in self.rows if best and not row.refused and _axes(row) != _axes(best)
        ]
        if best is None or not others:
            return ""
        other = max(others, key=lambda row: (row.fits, row.mfu))
        spelled = " ".join(f"{name}={size}" for name, size in other.mesh.items())
        spelled += f" with micro-batches of {other.batch}" if other.batch else ""
        if not other.fits:
            return f"no mesh of other axes fits, the quickest is {spelled}"
        more = {name: other.parts[name] - best.parts[name] for name in best.parts}
        most = max(more, key=lambda name: more[name])
        less = 100 * (1 - other.mfu / best.mfu)
        return f"{spelled}, the next of other axes, does {less:.0f}% less, because {_WHY[most]}"


_WHY = {
    "compute": "its products are slower",
    "again": "it computes more again",
    "exposed": "its compute waits longer for communication",
    "idle": "its stages wait longer for each other",
    "optimizer": "its optimizer's step takes longer",
}


def _axes(row: MeshPrice) -> tuple[int, ...]:
    """The sizes of the axes that are not data-parallel."""
    return tuple(row.mesh.get(name, 1) for name in ("pp", "ep", "cp", "tp"))


class MeshPrices:
    """The profile of one planned graph, as it is and with what is computed again."""

    def __init__(self, planned: Planned, n: int, machine: Cluster, asked: Asked) -> None:
        self.planned = planned = planned.with_losses(fits=True)
        self.smaller = planned.with_losses(fits=False).decisions  # where not all fits
        self.n, self.machine, self.asked, self.training = n, machine, asked, asked.training
        self.cuts = asked.config.inner != "eager"
        outer = planned.outer
        self.gap = None if outer is None else outer.gap(planned.decisions)
        self.free = self._profile(planned.decisions)

    def _profile(self, decisions: Decisions) -> Profile:
        graph = (self.planned.serial, decisions, self.planned.parameters)
        bucket_bytes = self.asked.config.bucket_bytes
        return profile(*graph, self.n, self.machine, bucket_bytes, self.training)

    @cached_property
    def by_chunks(self) -> Profile:
        """The profile with losses as they are where a step does not fit otherwise."""
        each = (self.smaller, self.planned.decisions)
        one, other = (chunks_of(decisions.losses).gradients.keys() for decisions in each)
        return self.free if one == other else self._profile(self.smaller)

    def following(self, decisions: Decisions) -> MeshPrices:
        """The prices of another plan of the graph."""
        decisions = replace(decisions, unbudgeted=self.planned.decisions)
        planned = replace(self.planned, decisions=decisions)
        return MeshPrices(planned, self.n, self.machine, self.asked)

    @cached_property
    def frontier(self) -> Frontier:
        """Less memory for more time."""
        return self._frontier(self.planned, self.smaller)

    def _frontier(self, planned: Planned, decisions: Decisions) -> Frontier:
        graph, host = (planned.serial, decisions), self.asked.config.host_memory
        return frontier(*graph, self.n, self.machine, self.training, host, self.asked.cuts_made)

    def row(self, mesh: AxisSizes, limit: int | None = None) -> MeshPrice:
        """The price of a mesh without pp. limit: bytes of a rank, in place of those asked for."""
        layout, training = self.asked.layout(mesh), self.asked.training_on(mesh)
        limit = self.asked.limit if limit is None else limit
        one, chosen = self.within(limit, layout, training)
        losses = self.planned.decisions if one is self.free else self.smaller
        held = footprint(one, layout, training)
        took = timing(one, layout, training, self.machine.on(mesh))
        priced = self._price(mesh, limit, one, held, took, training.microbatches)
        chunked = len(chunks_of(losses.losses).gradients)
        return replace(priced, recomputation=chosen, gap=self.gap, chunked_losses=chunked)

    def staged(self, mesh: AxisSizes) -> MeshPrice | None:
        """The price of a mesh with pp; None where the model has none, and other meshes are tried.

        Raises PlanError where it was asked for alone.
        """
        training, pp, limit = self.training, mesh["pp"], self.asked.limit
        alone = self.asked.meshes == 1
        count = self.asked.count(mesh)
        if not self.stages.can_run() and not alone:
            return None
        orders = self.asked.orders if self.stages.losses == 1 else self.asked.orders[:1]
        every = (
            self.stages.price(mesh, self.asked.layout(mesh), training, count, limit, order)
            for order in orders
        )
        some = sorted(filter(None, every), key=lambda one: (one[1].total > limit, one[2].step))
        found = next(iter(some), None)  # one that fits, then the quicker
        if found is None and alone:
            chunks = self.asked.orders[0][1]
            raise PlanError(
                f"the graph cannot be cut into {pp * chunks} stages, for pp={pp}: "
                f"there are {len(self.stages.places)} places between its operators where it "
                "can",
                remedy="Give pp fewer ranks.",
            )
        if found is None:
            return None
        one, held, took, pipeline = found
        priced = self._price(mesh, limit, one, held, took, count)
        why = refusal(mesh, any(map(is_mixture, self.planned.serial.graph.nodes)))
        return replace(priced, recomputation=pipeline.again, pipeline=pipeline, refused=why)

    def _price(
        self,
        mesh: AxisSizes,
        limit: int,
        one: Profile,
        held: Footprint,
        took: Timing,
        microbatches: int,
    ) -> MeshPrice:
        """What rows with pp and without have in common."""
        layout, training = self.asked.layout(mesh), self.training
        on_host = None
        if training.states == "host":
            on_host = host_update(one.weights, layout, training, self.machine)
        owned = owned_update(one.weights, layout, training, self.machine, one.n)
        held = replace(held, optimizer=held.optimizer + owned.states)
        used = _utilisation(one, layout, took.step, self.asked.batches)
        return MeshPrice(
            mesh=dict(mesh),
            memory=held,
            timing=took,
            mfu=microbatches * used / mesh.get("pp", 1),
            unfit=self._unfit(held, limit, layout, one),
            plan=replace(self.planned.plan, mesh=dict(mesh)),
            microbatches=microbatches,
            batch=self.asked.batch if self.asked.samples else None,
            host_update=on_host,
            owned=owned,
        )

    @cached_property
    def stages(self) -> GraphStages:
        """The graph cut into stages, whose losses are whole."""
        planned, free, choices = self.planned, self.free, self.frontier
        if chunks_of(self.smaller.losses).gradients:
            planned = replace(planned, decisions=replace(planned.decisions, losses={}))
            free = self._profile(planned.decisions)
            choices = self._frontier(planned, planned.decisions)
        given = (self.machine, self.training, self.asked.cuts_made if self.cuts else None)
        return GraphStages(planned, free, choices, *given)

    def _unfit(self, held: Footprint, limit: int, layout: Layout, one: Profile) -> str:
        """Why a rank's memory does not hold it, with the numbers and what would help."""
        host = self.machine.device.host is not None
        if held.total <= limit:
            return ""
        states = held.parameters + held.gradients + held.optimizer
        split = layout.shard * one.n
        if states > held.activations:
            why = f"parameters and their states alone are {states / 1e9:.3g}"
        elif (beside := held.total - held.activations) > limit:
            why = f"without activations it is {beside / 1e9:.3g}"
        else:
            again = ", with all recomputed that can be" if held.activations and self.cuts else ""
            why = f"activations are {held.activations / 1e9:.3g}{again}"
        if not self.cuts and held.total - held.activations <= limit:
            why += '; inner="eager" recomputes nothing'
        takes = [f"devices that hold {held.total / 1e9:.3g} GB of tensors"]
        if host and held.total - held.optimizer <= limit:
            takes.append("the optimizer's states on the host (memory.optimizer_states=host)")
        room = limit - (held.total - held.activations)
        if room > 0:
            parts = math.ceil(held.activations / room)
            takes.append(f"a batch {parts} times smaller, in {parts} microbatches")
        if (room := limit - (held.total - states)) > 0:
            ranks = math.ceil(split * states / room)
            takes.append(f"{ranks} ranks that share the parameters, instead of {split}")
        return (
            f"{held.total / 1e9:.3g} of {limit / 1e9:.3g} GB: {why}; it takes {', or '.join(takes)}"
        )

    def within(
        self, limit: int, layout: Layout, training: Training
    ) -> tuple[Profile, Recomputation | None]:
        """The quickest that holds at most `limit` bytes; the smallest where none does. Regions of
        activation checkpointing are computed again as the model has it. With `inner="eager"` no
        graph is cut, and nothing is computed again."""
        if not self.cuts:
            return self.free, None
        held = footprint(self.free, layout, training)
        regions = any("ac_graph_id" in node.meta for node in self.planned.serial.graph.nodes)
        if held.total <= limit and not regions:
            return self.free, None
        free = self.by_chunks
        held = footprint(free, layout, training)
        if held.total <= limit and not regions:
            return free, None
        beside = held.total - free.activations.saved
        points = self.frontier.points
        index = self.frontier.cheapest(limit - beside)
        if not points or (index is None and beside > limit):
            return free, None  # weights alone are too much
        chosen = self.frontier.recomputation(len(points) - 1 if index is None else index)
        # regions of the model's own spare bytes too, which the frontier begins without
        spared = max(0, free.activations.saved - chosen.kept)
        chosen = replace(chosen, spared=spared)
        return with_recomputation(free, chosen), chosen


def _utilisation(one: Profile, layout: Layout, step: float, batches: int | None) -> float:
    """The model's operations over those the devices could do in a step; 0 for an empty step."""
    copies = layout.batches
    useful = min(copies, batches or copies)
    return useful * one.flops / (step * copies * one.n * one.peak) if step else 0.0
