"""A deep graph by a few of its layers: what is planned in no time, and prices of the whole depth.

Layers that are equal are planned alike: of a run of them a graph is made that has three, and is
planned like any other. The first has what is before the layers beside it, the last what is after;
the one between stands for all the others. A mesh is priced by these three, and what it must compute
again by the choices that the layer between has. That says which meshes are worth a plan of the
whole graph, whose prices a search compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from torch import fx

from autoshard.compiling import label, tandem_repeats
from autoshard.errors import AutoshardError
from autoshard.mesh_search.factorisations import Asked, AxisSizes, PlanAxes, planned_axes
from autoshard.mesh_search.prices import GAIN, MeshPrices
from autoshard.mesh_search.rank_stages import (
    StageSpan,
    cut_units,
    joined,
    pass_seconds,
    stage_footprint,
)
from autoshard.mesh_search.stages import Scheduled, StageOrder, step_of
from autoshard.planning.cost import WAIT_SECONDS
from autoshard.planning.estimate import (
    Footprint,
    Profile,
    SavedForBackward,
    footprint,
    timing,
    waits_of,
)
from autoshard.runtime import compat
from autoshard.runtime.graph_meta import MUTATED
from autoshard.runtime.pipeline import ScheduleShape, is_possible, kept_at_once, timeline

KEPT = 3
FEWEST = 12
"""Equal layers below which the whole graph is planned at once."""
PLANS = 3
"""Of a deep graph, how many plans are made whole."""


@dataclass(frozen=True)
class Shallow:
    """A captured graph with three of its `count` equal layers. weights: names, by layer."""

    graph: fx.GraphModule
    inputs: list[compat.GraphInput]
    weights: tuple[frozenset[str], ...]
    count: int


def shallow(captured: fx.GraphModule, inputs: Sequence[compat.GraphInput]) -> Shallow | None:
    """The graph with three of its equal layers; None where it has few, or what is after them reads
    more than the last."""
    nodes = [n for n in captured.graph.nodes if n.op not in ("placeholder", "output")]
    repeats = tandem_repeats([label(node) for node in nodes])
    if not repeats or captured.meta.get(MUTATED):
        return None
    start, one, most = max(repeats, key=lambda one: one[1] * one[2])
    for period, count in ((one, most), (2 * one, most // 2)):  # windows and whole attention
        layers = [nodes[start + i * period :][:period] for i in range(count)]
        if count >= FEWEST and _are_equal(layers):
            return _cut(captured, inputs, layers)
    return None


def _are_equal(layers: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether layers read the same of what is outside, of themselves and of the one before, and
    nothing after them reads another than the last."""
    at = {node: (i, k) for i, layer in enumerate(layers) for k, node in enumerate(layer)}

    def reads(number: int, node: fx.Node) -> list[object]:
        found: list[object] = []
        for one in node.all_input_nodes:
            own = at.get(one)
            if own is not None:
                found.append((number - own[0], own[1]))
            elif one.op == "placeholder" and all(at.get(u, (-1,))[0] == number for u in one.users):
                found.append("weight")
            else:
                found.append(one)
        return found

    for number, layer in enumerate(layers):
        for k, node in enumerate(layer):
            if number > 1 and reads(number, node) != reads(1, layers[1][k]):
                return False
            later = (at.get(user, (len(layers),))[0] for user in node.users)
            if any(one > number + 1 for one in later):
                return False
    return True


def _cut(
    captured: fx.GraphModule,
    inputs: Sequence[compat.GraphInput],
    layers: Sequence[Sequence[fx.Node]],
) -> Shallow:
    gone = {node for layer in layers[KEPT:] for node in layer}
    instead = dict(zip(layers[-1], layers[KEPT - 1]))
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    kept: list[compat.GraphInput] = []
    placeholders = captured.graph.find_nodes(op="placeholder")
    items = dict(zip(placeholders, inputs, strict=True))
    for node in captured.graph.nodes:
        if node in items:
            if node.users and gone.issuperset(node.users):
                continue
            kept.append(items[node])
        if node not in gone:
            made[node] = graph.node_copy(node, lambda one: made[instead.get(one, one)])
    short = fx.GraphModule(captured, graph)
    short.meta = dict(captured.meta)
    weights = tuple(
        frozenset(items[one].name for node in layer for one in node.all_input_nodes if one in items)
        for layer in layers[:KEPT]
    )
    shared = frozenset.intersection(*weights)
    return Shallow(short, kept, tuple(one - shared for one in weights), len(layers))


class Screened(NamedTuple):
    """A mesh of a deep graph, by its layers: `rate` is the samples that a rank does in a second, or
    the batches that were given; plan: the axes that are planned; batch: of a micro-batch."""

    mesh: AxisSizes
    order: StageOrder
    rate: float
    fits: bool
    plan: PlanAxes
    batch: int


class _LayerChoice(NamedTuple):
    """Of a layer between, at a choice: bytes kept, there beside them, and seconds more."""

    kept: int
    beside: int
    seconds: float


class Layers:
    """A planned shallow graph as layers: the first, one between and the last."""

    def __init__(self, choices: MeshPrices, short: Shallow) -> None:
        self.choices, self.asked, self.short = choices, choices.asked, short
        self.between = short.count - 2
        self._joined: dict[tuple[object, ...], Profile] = {}

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

    def joined(self, ends: tuple[bool, bool], between: int, live: int = 1) -> Profile:
        """The profile of so many layers between, with the first and the last where `ends` says."""
        key = ends, between, live
        if key not in self._joined:
            first, layer, last = self.parts
            one = joined([*[first] * ends[0], *[layer] * between, *[last] * ends[1]])
            held = one.activations
            kept = SavedForBackward(live * held.saved, held.transient)
            self._joined[key] = replace(one, activations=kept)
        return self._joined[key]

    @cached_property
    def whole(self) -> Profile:
        """The profile at the whole depth, with losses as where a step is short of memory."""
        one, smaller = self.joined((True, True), self.between), self.choices.by_chunks.activations
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

    def at_most(self, mesh: AxisSizes) -> tuple[bool, float]:
        """Whether a mesh may fit, and the most batches a second and rank: what a rank computes and
        waits for on the planned axes, and what it stores, are not less."""
        layout, training = self.asked.layout(mesh), self.asked.training
        machine, pp = self.choices.machine.on(mesh), mesh.get("pp", 1)
        axes, took = {**self.choices.stages.ranks, **layout.ranks}, []
        fusing = self.choices.free.fusing if pp == 1 else None
        for part in self.parts:
            part = replace(part, fusing=fusing)
            _, *waits = waits_of(part, axes, machine.real_links)
            took.append(part.compute + sum(map(sum, waits)))
        step = took[0] + self.between * took[1] + took[2]
        held = [footprint(part, layout, training) for part in self.parts]
        stored = [one.parameters + one.gradients + one.optimizer for one in held]
        least = (stored[0] + self.between * stored[1] + stored[2]) / pp
        rate = pp * self.asked.batch * layout.batches / (step * math.prod(mesh.values()))
        return least <= self.asked.limit, rate

    def screened(self, mesh: AxisSizes) -> Screened | None:
        """A mesh by its layers; None where it has more stages than there are layers."""
        layout, training = self.asked.layout(mesh), self.asked.training_on(mesh)
        machine, ranks = self.choices.machine.on(mesh), math.prod(mesh.values())
        if mesh.get("pp", 1) == 1:
            held = footprint(self.whole, layout, training)
            took = timing(self.whole, layout, training, machine).step
            more = self.again(held, self.between)
            times = training.microbatches
            step = took + times * self.between * (more or 0.0)
            rate = times * layout.batches / (step * ranks)
            return self._screened(mesh, ("1f1b", 1), rate, more is not None)
        found = [self._pipeline(mesh, order) for order in self.asked.orders]
        return max(
            (one for one in found if one is not None),
            key=lambda one: (one.fits, one.rate),
            default=None,
        )

    def _pipeline(self, mesh: AxisSizes, order: StageOrder) -> Screened | None:
        layout, training = replace(self.asked.layout(mesh), staged=True), self.asked.training
        machine, (schedule, chunks), ranks = self.choices.machine.on(mesh), order, mesh["pp"]
        count = self.asked.count(mesh)
        shape = ScheduleShape(ranks, count, chunks)
        units = [0, *[1] * self.between, 2]
        if len(units) < ranks * chunks or not is_possible(schedule, shape):
            return None
        axes = {**self.choices.stages.ranks, **layout.ranks}
        took = {i: pass_seconds(one, axes, machine.real_links) for i, one in enumerate(self.parts)}
        sent = self._sent
        over = machine.real_links["pp"].seconds(sent)
        spans = cut_units(units, took, over, ranks * chunks, count)
        if spans is None:
            return None
        live = [kept_at_once(schedule, shape, rank) for rank in range(ranks)]
        at_once = [live[i % ranks][i // ranks] for i in range(len(spans))]
        stages = [
            self.joined((0 in span, 2 in span), span.count(1), times)
            for span, times in zip(spans, at_once)
        ]
        parts = [joined(stages[rank::ranks]) for rank in range(ranks)]
        layers = [span.count(1) * times for span, times in zip(spans, at_once)]
        more = [
            self.again(stage_footprint(part, layout, training), sum(layers[rank::ranks]))
            for rank, part in enumerate(parts)
        ]
        forward = [sum(took[unit][0] for unit in span) + over for span in spans]
        backward = [
            sum(took[unit][1] for unit in span) + over + span.count(1) * (more[i % ranks] or 0.0)
            for i, span in enumerate(spans)
        ]
        one = Scheduled(
            parts=parts,
            sent=((sent, 1),) * (len(spans) - 1),
            seconds=tuple(zip(forward, backward)),
            times=timeline(schedule, count, forward, backward, chunks),
            stages=(),
            microbatches=count,
            order=order,
        )
        step = step_of(one, axes, machine, layout, training, 0.0)[2].step
        rate = count * layout.batches / (step * math.prod(mesh.values()))
        return self._screened(mesh, order, rate, None not in more)

    def _screened(self, mesh: AxisSizes, order: StageOrder, rate: float, fits: bool) -> Screened:
        size, plan = self.asked.batch, planned_axes(mesh, self.asked.config)
        return Screened(mesh, order, size * rate, fits, plan, size)

    @cached_property
    def _sent(self) -> int:
        a, b = self.spans[1]
        return min(size for size, _ in self.choices.stages.crossing[a:b] if size > 0)


def worth_a_plan(
    meshes: Sequence[AxisSizes],
    asked: Asked,
    of: Callable[[Asked], tuple[Shallow, Callable[[PlanAxes], MeshPrices]]],
) -> list[Screened]:
    """The best mesh of each number of stages and plan, best first, of the PLANS best plans.

    of: the shallow graph of a micro-batch, and its plans. Meshes are tried in the order of what
    they do at most, until no other can be among the best, and those of a plan with a larger
    micro-batch while that is quicker.
    """
    best: dict[object, Screened] = {}

    def at(mesh: AxisSizes) -> object:
        return mesh.get("pp", 1), planned_axes(mesh, asked.config)

    for size in asked.sizes:
        sized = replace(asked, batch=size)
        meshes = [mesh for mesh in meshes if sized.count(mesh)]
        given, known = of(sized), dict[PlanAxes, Layers | None]()
        bounds: list[tuple[bool, float, int, Layers, AxisSizes]] = []
        for mesh in meshes:
            key = planned_axes(mesh, asked.config)
            if key not in known:
                known[key] = _layers(key, *given)
            if (layers := known[key]) is not None:
                possible, rate = layers.at_most(mesh)
                bounds.append((not possible, -rate, len(bounds), layers, mesh))
        for impossible, rate, _, layers, mesh in sorted(bounds, key=lambda one: one[:3]):
            found = _of_plans(best.values())
            if len(found) == PLANS and all(one.fits for one in found.values()):
                if impossible or -rate < min(one.rate for one in found.values()):
                    break
            one = layers.screened(mesh)
            if one is not None and _is_quicker(one, best.setdefault(at(mesh), one)):
                best[at(mesh)] = one
        larger = {key for key, one in best.items() if one.fits and one.batch == size}
        meshes = [mesh for mesh in meshes if at(mesh) in larger]
    some = sorted([one for one in best.values() if one.fits] or best.values(), key=_order)
    plans = _of_plans(some)
    return [one for one in some if (one.plan, one.batch) in plans]


def _layers(
    key: PlanAxes, short: Shallow, prices: Callable[[PlanAxes], MeshPrices]
) -> Layers | None:
    """None where an option has no such plan, or rows do not travel to experts."""
    try:
        choices = prices(key)
    except AutoshardError:
        return None
    return Layers(choices, short) if choices.free.exchanges or "ep" not in dict(key) else None


def _of_plans(found: Iterable[Screened]) -> dict[object, Screened]:
    """The best mesh of each of the best plans."""
    best: dict[object, Screened] = {}
    for one in sorted(found, key=_order):
        if len(best) < PLANS:
            best.setdefault((one.plan, one.batch), one)
    return best


def _order(one: Screened) -> tuple[bool, float]:
    return not one.fits, -one.rate


def _is_quicker(one: Screened, before: Screened) -> bool:
    """Whether a mesh is better than another of its plan, as `MeshPrice.is_quicker` has it."""
    gain = GAIN if one.batch > before.batch else 1.0
    return _order(one._replace(rate=one.rate / gain)) < _order(before)
