"""A deep graph by a few of its layers: what is planned in no time, and prices of the whole depth.

Layers that are equal are planned alike: of a run of them a graph is made that has three, and is
planned like any other. The first has what is before the layers beside it, the last what is after;
the one between stands for all the others. A mesh is priced by these three, and what it must compute
again by the choices that the layer between has. That says which meshes are worth a plan of the
whole graph, whose prices a search compares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from autoshard.errors import AutoshardError
from autoshard.mesh_search.deep_graphs import PLANS, Screened, Shallow, of_plans
from autoshard.mesh_search.factorisations import (
    Asked,
    AxisSizes,
    PlanAxes,
    apart,
    most_done,
    planned_axes,
)
from autoshard.mesh_search.prices import MeshPrices
from autoshard.mesh_search.rank_stages import CutLayers, StageSpan, cut_units, joined, pass_seconds
from autoshard.mesh_search.stages import RankCosts, Scheduled, StageOrder, step_of
from autoshard.planning import Decisions
from autoshard.planning.cost import WAIT_SECONDS
from autoshard.planning.estimate import (
    Footprint,
    Profile,
    SavedForBackward,
    Sent,
    data_collectives,
    footprint,
    seconds,
    timing,
    waits_of,
)
from autoshard.runtime.mesh import PLANNED
from autoshard.runtime.pipeline import ScheduleShape, is_possible, kept_at_once


class _LayerChoice(NamedTuple):
    """Of a layer between, at a choice: bytes kept, there beside them, and seconds more."""

    kept: int
    beside: int
    seconds: float


Priced = Callable[[PlanAxes, Decisions | None], MeshPrices]
"""What plans some axes, and prices them; with a plan of the outer one to follow."""

Took = dict[int, tuple[float, float]]


class Layers:
    """A planned shallow graph as layers: the first, one between and the last."""

    def __init__(self, choices: MeshPrices, short: Shallow) -> None:
        self.choices, self.asked, self.short = choices, choices.asked, short
        self.between = short.count - 2
        self._joined: dict[tuple[object, ...], Profile] = {}
        self._passes: dict[tuple[object, ...], tuple[float, float]] = {}
        self._cuts: dict[tuple[object, ...], CutLayers | None] = {}

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where the three layers are among the operators of the planned graph."""
        stages, starts = self.choices.stages, list[int]()
        for names in self.short.weights[1:]:
            uses = [one.use for one in stages.whole.weights if one.name in names]
            starts.append(min(use for use in uses if use is not None))
        return list(pairwise([0, *starts, len(stages.nodes)]))

    @cached_property
    def parts(self) -> list[Profile]:
        """The profiles of the three, with what rows do that travel to experts."""
        stages, found = self.choices.stages, list[Profile]()
        whole = stages.whole
        travel = [sent for mixture in whole.exchanges for sent in mixture]
        forward = list(whole.forward)
        for mixture in whole.exchanges:
            forward[mixture[0].at] += WAIT_SECONDS
        for a, b in self.spans:
            sent = tuple(
                one._replace(at=one.at - a, beside=tuple(i - a for i in one.beside if a <= i < b))
                for one in (*whole.sent, *travel)
                if a <= one.at < b
            )
            part = replace(stages.part(a, b, 1, ()), sent=sent, exchanges=())
            found.append(replace(part, forward=tuple(forward[a:b])))
        return found

    @cached_property
    def choices_between(self) -> list[_LayerChoice]:
        """What a layer between may keep, by rising time."""
        stages = self.choices.stages
        if stages.choices is None:
            return []
        points = stages.choices.of(StageSpan(*self.spans[1], 2)).points
        return [_LayerChoice(one.kept, one.peak - 2 * one.kept, one.seconds) for one in points]

    def joined(self, stages: Sequence[Sequence[int]], live: Sequence[int]) -> Profile:
        """The profile of stages of these layers, each of which keeps so many micro-batches; with
        other numbers of those the same, but for the activations."""
        key = tuple((0 in units, units.count(1), 2 in units) for units in stages)
        if key not in self._joined:
            self._joined[key] = joined([self.parts[unit] for units in stages for unit in units])
        one, saved = self._joined[key], [part.activations.saved for part in self.parts]
        kept = sum(times * saved[unit] for units, times in zip(stages, live) for unit in units)
        held = SavedForBackward(kept, one.activations.transient)
        return replace(one, activations=held)

    @cached_property
    def whole(self) -> Profile:
        """The profile at the whole depth, with losses as where a step is short of memory."""
        one = self.joined([[0, *[1] * self.between, 2]], [1])
        smaller = self.choices.by_chunks.activations
        spared = self.choices.stages.whole.activations.saved - smaller.saved
        saved = max(0, one.activations.saved - spared)
        held = SavedForBackward(saved, smaller.transient)
        return replace(one, activations=held, fusing=self.choices.free.fusing)

    def again(self, held: Footprint, layers: int) -> float | None:
        """Seconds of each of so many layers between (of all micro-batches that are there at once)
        for what is computed again to fit; None: nothing would do."""
        points, over = self.choices_between, held.total - self.asked.limit
        regions = self.choices.stages.choices is not None and self.choices.stages.choices.regions
        if over <= 0 and not regions:
            return 0.0
        if not points or not layers:
            return 0.0 if over <= 0 else None
        free = points[0]
        fits = [free.kept - (over + one.beside - free.beside) / layers for one in points]
        if points[0].kept <= fits[0]:
            return points[0].seconds
        for (one, _), (other, room) in pairwise(zip(points, fits)):
            if other.kept <= room:  # some layers as before, the others so
                part = (one.kept - room) / max(1, one.kept - other.kept)
                return one.seconds + max(0.0, part) * (other.seconds - one.seconds)
        return None

    def may_hold(self, mesh: AxisSizes, samples: int) -> bool:
        """Whether a mesh without pp fits with so many samples in a micro-batch: activations are in
        proportion to them."""
        held = footprint(self.whole, self.asked.layout(mesh), self.asked.training_on(mesh))
        room = self.asked.limit - held.total + held.activations
        less = int(room * (1 - self.asked.batch / samples))
        more = self.again(replace(held, activations=held.activations + less), self.between)
        return room > 0 and more is not None

    def passes(self, mesh: AxisSizes) -> tuple[float, float]:
        """Seconds of a micro-batch in all layers: what a rank computes, and what it waits for on
        the planned axes."""
        layout, links = self.asked.layout(mesh), self.choices.machine.on(mesh).real_links
        fusing = self.choices.free.fusing if mesh.get("pp", 1) == 1 else None
        key = fusing is None, layout.experts, *(links[axis] for axis in ("ep", "cp", "tp"))
        if key not in self._passes:
            axes, took = {**self.choices.stages.ranks, **layout.ranks}, []
            for part in self.parts:
                _, *waits = waits_of(replace(part, fusing=fusing), axes, links)
                took.append((part.compute, sum(map(sum, waits))))
            first, layer, last = took
            compute, waited = (a + self.between * b + c for a, b, c in zip(first, layer, last))
            self._passes[key] = compute, waited
        return self._passes[key]

    def at_most(self, mesh: AxisSizes) -> tuple[bool, float]:
        """Whether a mesh may fit, and the most samples a second and rank: what its passes take, and
        what it stores and sends, are not less."""
        layout = self.asked.layout(mesh)
        held = [footprint(part, layout, self.asked.training) for part in self.parts]
        stored = [one.parameters + one.gradients + one.optimizer for one in held]
        least = (stored[0] + self.between * stored[1] + stored[2]) / mesh.get("pp", 1)
        most = most_done(mesh, self.asked, sum(self.passes(mesh)), self.data(mesh, self.asked))
        return least <= self.asked.limit, most

    def data(self, mesh: AxisSizes, asked: Asked) -> float:
        """The least seconds of a step for what data-parallel axes send: all layers at once."""
        layout, links = asked.layout(mesh), self.choices.machine.on(mesh).real_links
        axes, often = {**self.choices.stages.ranks, **layout.ranks}, (1, self.between, 1)
        sent: dict[Sent, int] = {}
        for part, layers in zip(self.parts, often):
            used = [weight for weight in part.weights if weight.use is not None]
            for one in data_collectives(used, layout, asked.training):
                kind = one._replace(at=0, nbytes=0)
                sent[kind] = sent.get(kind, 0) + layers * one.nbytes
        times, found = asked.count(mesh) if mesh.get("pp", 1) == 1 else 1, 0.0
        for kind, nbytes in sent.items():
            again = 1 if layout.deferred and kind.op != "all_gather" else times
            found += again * seconds(kind._replace(nbytes=nbytes), axes, links)
        return found

    def screened(self, mesh: AxisSizes) -> Screened | None:
        """A mesh by its layers; None where it has more stages than there are layers."""
        layout, training = self.asked.layout(mesh), self.asked.training_on(mesh)
        if mesh.get("pp", 1) == 1:
            machine, times = self.choices.machine.on(mesh), training.microbatches
            more = self.again(footprint(self.whole, layout, training), self.between)
            took = timing(self.whole, layout, training, machine).step
            step = took + times * self.between * (more or 0.0)
            rate = times * layout.batches / (step * math.prod(mesh.values()))
            return self._screened(mesh, ("1f1b", 1), rate, more is not None)
        axes, machine = {**self.choices.stages.ranks, **layout.ranks}, self.choices.machine.on(mesh)
        given = (axes, machine, replace(layout, staged=True), self.asked.training)
        costs = RankCosts(*given, self.asked.count(mesh))
        found = filter(None, (self._pipeline(mesh, order, costs) for order in self.asked.orders))
        return max(found, key=lambda one: (one.fits, one.rate), default=None)

    def _cut(
        self, order: StageOrder, ranks: int, count: int, took: Took, over: float
    ) -> CutLayers | None:
        """The stages of `ranks` ranks; None where an order has none. took: seconds of the first
        layer, one between and the last, forward and backward. Alike for data-parallel layouts."""
        key = order, ranks, count, tuple(took.items()), over
        if key in self._cuts:
            return self._cuts[key]
        (schedule, chunks), units = order, [0, *[1] * self.between, 2]
        found: CutLayers | None = None
        shape = ScheduleShape(ranks, count, chunks)
        possible = is_possible(schedule, shape)
        spans = cut_units(units, took, over, ranks * chunks, count) if possible else None
        if spans is not None:
            own = [spans[rank::ranks] for rank in range(ranks)]
            live = [kept_at_once(schedule, shape, rank) for rank in range(ranks)]
            layers = [
                sum(units.count(1) * times for units, times in zip(*each))
                for each in zip(own, live)
            ]
            found = CutLayers(spans, list(map(self.joined, own, live)), layers)
        return self._cuts.setdefault(key, found)

    def _pipeline(self, mesh: AxisSizes, order: StageOrder, costs: RankCosts) -> Screened | None:
        ranks, count, links = mesh["pp"], costs.microbatches, costs.machine.real_links
        sent, batches = self._sent, self.asked.layout(mesh).batches
        took = {i: pass_seconds(one, costs.ranks, links) for i, one in enumerate(self.parts)}
        over = links["pp"].seconds(sent)
        cut = self._cut(order, ranks, count, took, over)
        if cut is None:
            return None
        spans, parts, layers = cut
        more = [self.again(costs.of(part).memory, kept) for part, kept in zip(parts, layers)]
        forward = [sum(took[unit][0] for unit in span) + over for span in spans]
        backward = [
            sum(took[unit][1] for unit in span) + over + span.count(1) * (more[i % ranks] or 0.0)
            for i, span in enumerate(spans)
        ]
        one = Scheduled(
            parts=parts,
            sent=((sent, 1),) * (len(spans) - 1),
            seconds=tuple(zip(forward, backward)),
            times=self.choices.stages.takes(order, count, forward, backward),
            stages=(),
            microbatches=count,
            order=order,
        )
        step = step_of(one, costs, 0.0)[2].step
        rate = count * batches / (step * math.prod(mesh.values()))
        return self._screened(mesh, order, rate, None not in more)

    def _screened(self, mesh: AxisSizes, order: StageOrder, rate: float, fits: bool) -> Screened:
        size, plan = self.asked.batch, planned_axes(mesh, self.asked.config)
        return Screened(mesh, order, size * rate, fits, plan, size)

    @cached_property
    def _sent(self) -> int:
        a, b = self.spans[1]
        return min(size for size, _ in self.choices.stages.crossing[a:b] if size > 0)


class _Plans:
    """The plans of the layers of a micro-batch, made as they are asked for."""

    def __init__(self, asked: Asked, short: Shallow, prices: Priced, before: _Plans | None) -> None:
        """before: of smaller micro-batches, whose plans of an outer axis are followed."""
        self.asked, self.given = asked, (short, prices)
        self.known, self.before = dict[PlanAxes, Layers | None](), dict[PlanAxes, Layers | None]()
        if before is not None:
            self.before = {**before.before, **before.known}

    def of(self, key: PlanAxes) -> Layers | None:
        if key not in self.known:
            self.known[key] = _layers(key, *self.given, self.before.get(key))
        return self.known[key]

    def in_order(
        self, meshes: Sequence[AxisSizes], known: bool
    ) -> Iterator[tuple[bool, float, AxisSizes, Layers | None]]:
        """Whether a mesh may not fit, and the most it does, in that order. Without layers where
        that is by other plans than its own: then it comes again."""
        waiting: list[tuple[bool, float, int, bool]] = []

        def wait(i: int, known: bool) -> None:
            if (bound := self._bound(meshes[i], known)) is not None:
                heapq.heappush(waiting, (*bound, i, known))

        for i in range(len(meshes)):
            wait(i, known and planned_axes(meshes[i], self.asked.config) not in self.before)
        while waiting:
            impossible, rate, i, exact = heapq.heappop(waiting)
            layers = self.of(planned_axes(meshes[i], self.asked.config)) if exact else None
            yield impossible, -rate, meshes[i], layers
            if not exact:
                wait(i, True)

    def _bound(self, mesh: AxisSizes, known: bool) -> tuple[bool, float] | None:
        """Whether a mesh may not fit, and the most it does, as a negative number. known: by its own
        plan; else by that of a smaller micro-batch, which sends as much on data-parallel axes, and
        by those of tp alone, and of its other axis where that is made: on both a rank computes its
        part of what it would on one, and waits no less for either. None: there is no such plan."""
        key = planned_axes(mesh, self.asked.config)
        if known:
            if (layers := self.of(key)) is None:
                return None
            possible, rate = layers.at_most(mesh)
            return not possible, -rate
        compute, waited, shared = 0.0, 0.0, math.prod(n for name, n in key if name in PLANNED)
        for name, one in apart(key).items():
            layers = self.of(one) if name == "tp" else self.known.get(one)
            if layers is not None:
                parts = shared // dict(key)[name] if name in PLANNED else shared
                took, waits = layers.passes(mesh)
                compute, waited = max(compute, took / parts), waited + waits / parts
        before = self.before.get(key)
        data = before.data(mesh, self.asked) if before else 0.0
        return False, -most_done(mesh, self.asked, compute + waited, data)

    def may_gain(self, mesh: AxisSizes, least: float) -> bool:
        """Whether a mesh that was not priced may do so much with a larger micro-batch, and fit:
        what kept it from that is what data-parallel axes send, then for more samples at once."""
        key = planned_axes(mesh, self.asked.config)
        layers = self.known.get(key, self.before.get(key))
        if layers is None or not layers.at_most(mesh)[0]:
            return False
        if key in self.known and most_done(mesh, self.asked, sum(layers.passes(mesh))) < least:
            return False
        return "pp" in mesh or layers.may_hold(mesh, 2 * self.asked.batch)


def worth_a_plan(
    meshes: Sequence[AxisSizes],
    asked: Asked,
    of: Callable[[Asked], tuple[Shallow, Priced]],
) -> list[Screened]:
    """The best mesh of each number of stages and plan, best first, of the PLANS best plans.

    of: the shallow graph of a micro-batch, and its plans. Meshes are tried in the order of what
    they do at most, until no other can be among the best: those of one planned axis first, so that
    of two axes only those are planned that may do more. And those of a plan with a larger
    micro-batch while that is quicker, or may be for the first time.
    """
    best: dict[object, Screened] = {}
    plans: _Plans | None = None

    def at(mesh: AxisSizes) -> object:
        return mesh.get("pp", 1), planned_axes(mesh, asked.config)

    for size in asked.sizes:
        sized = replace(asked, batch=size)
        meshes = [mesh for mesh in meshes if sized.count(mesh)]
        if not meshes:
            break
        plans, least, priced = _Plans(sized, *of(sized), plans), 0.0, list[AxisSizes]()
        for known in (True, False):
            some = [m for m in meshes if known != bool(apart(planned_axes(m, asked.config)))]
            for impossible, rate, mesh, layers in plans.in_order(some, known):
                found = of_plans(best.values())
                if len(found) == PLANS and all(one.fits for one in found.values()):
                    least = min(one.rate for one in found.values())
                    if impossible or rate < least:
                        break
                one = None if layers is None else layers.screened(mesh)
                priced += [mesh] * (layers is not None)
                if one is not None and one.is_quicker(best.setdefault(at(mesh), one)):
                    best[at(mesh)] = one
        larger = {key for key, one in best.items() if one.fits and one.batch == size}
        others = [m for m in meshes if m not in priced and plans.may_gain(m, least)]
        meshes = [m for m in meshes if at(m) in larger or m in others]
    every = [one for one in best.values() if one.fits] or list(best.values())
    every.sort(key=lambda one: one.place)
    chosen = of_plans(every)
    return [one for one in every if (one.plan, one.batch) in chosen]


def _layers(key: PlanAxes, short: Shallow, prices: Priced, known: Layers | None) -> Layers | None:
    """None where an option has no such plan, or rows do not travel to experts."""
    outer = None if known is None else known.choices.planned.outer
    try:
        choices = prices(key, None if outer is None else outer.decisions)
    except AutoshardError:
        return _layers(key, short, prices, None) if outer else None
    return Layers(choices, short) if choices.free.exchanges or "ep" not in dict(key) else None
