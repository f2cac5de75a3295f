"""Meshes with pp: a planned graph cut into stages, and the price of a step on them.

A stage is a run of operators of the graph that the inner mesh (what is left of pp) has a plan for,
so one plan for each size of tp, and of cp and tp, serves every number of stages: a stage's profile
is a slice of the graph's. The cut is the exact one of planning/solver/stage_cut.py, at those places
where least is sent; layers that repeat are priced once, with the graph.

A step is the schedule's (runtime/pipeline/schedules.py) of m micro-batches, each a batch of one
data-parallel rank. Parameters that data-parallel ranks and those of cp share are gathered before it
and held, and gradients, which add up over the micro-batches, reduced after it; nothing of either is
hidden. On ep the rows of each micro-batch travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from torch import fx

from autoshard.building import Planned
from autoshard.mesh_search.rank_stages import StageChoices, StageSpan, joined, stage_footprint
from autoshard.planning import Recomputation, cheap_places, crossing, is_loss, places
from autoshard.planning.cost import Cluster, Link, Machine
from autoshard.planning.estimate import (
    Cuts,
    Footprint,
    Frontier,
    Layout,
    Profile,
    SavedForBackward,
    Saving,
    Sent,
    Timing,
    Traffic,
    Training,
    buckets,
    data_collectives,
    seconds,
    sent_by_axis,
    update_seconds,
    waits_of,
)
from autoshard.planning.solver import Chain, cut_stages
from autoshard.runtime.graph_meta import MUTATED
from autoshard.runtime.pipeline import Duration, ScheduleShape, duration, is_possible, kept_at_once

_MOST_PLACES = 256
"""Places for a cut that the search considers: those where least is sent, alike in every layer."""


StageOrder = tuple[str, int]
"""The schedule of a pipeline, and the stages of each rank."""


@dataclass(frozen=True, kw_only=True)
class PipelinePrice:
    """A step of a mesh with pp, of `microbatches`, in the order of a schedule with so many stages a
    rank. One entry a stage: seconds, of a forward and of a backward of one micro-batch; sent_bytes,
    to the next stage, of one micro-batch, whose gradient comes back. memory: of each rank, which
    has the stages of its number, and with `interleaved` those of as many ranks further on. idle:
    the part of the schedule that ranks wait. again: what the rank that computes most again does in
    a step, and spares of all that it keeps at once."""

    microbatches: int
    idle: float
    order: StageOrder
    seconds: tuple[tuple[float, float], ...]
    memory: tuple[Footprint, ...]
    sent_bytes: tuple[int, ...]
    again: Recomputation | None = None


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Stages at work, but for what data-parallel axes add. parts: of each rank, all its stages.
    sent: bytes and messages, of a micro-batch, to the next stage. chosen: what ranks compute again
    in a step, of all their micro-batches."""

    parts: list[Profile]
    sent: tuple[tuple[int, int], ...]
    seconds: tuple[tuple[float, float], ...]
    times: Duration
    stages: tuple[StageSpan, ...]
    microbatches: int
    order: StageOrder
    chosen: Mapping[int, Recomputation] = field(default_factory=dict)


class RankCost(NamedTuple):
    """A rank's memory, what it sends but to other stages, the seconds of what data-parallel axes
    add, and of the optimizer."""

    memory: Footprint
    sent: dict[str, Traffic]
    data: float
    update: float


class RankCosts:
    """What ranks of a pipeline cost on one mesh, asked once for those with the same weights.
    ranks: of each axis but pp."""

    def __init__(
        self,
        ranks: Mapping[str, int],
        machine: Machine,
        layout: Layout,
        training: Training,
        microbatches: int,
    ) -> None:
        self.given, self.machine = (layout, training), machine
        self.ranks, self.microbatches = ranks, microbatches
        self._known: dict[tuple[int, int], tuple[Profile, RankCost]] = {}

    def of(self, part: Profile) -> RankCost:
        """The costs of a rank with all its stages."""
        key, links = (id(part.weights), id(part.sent)), self.machine.real_links
        if key not in self._known:
            groups = buckets(part.weights, self.given[0])
            data = [one for each in groups for one in data_collectives(each, *self.given)]
            often = [(data, 1), (part.sent, self.microbatches)]
            cost = RankCost(
                stage_footprint(part, *self.given),
                sent_by_axis(((one, n) for each, n in often for one in each), self.ranks, links),
                sum(seconds(one, self.ranks, links) for one in data),
                update_seconds(part, *self.given, self.machine),
            )
            self._known[key] = part, cost  # which holds on to what the key is of
        cost, held = self._known[key][1], part.activations
        memory = replace(cost.memory, activations=held.saved + held.transient)
        return cost._replace(memory=memory)


def step_of(
    one: Scheduled, costs: RankCosts, compute: float
) -> tuple[Profile, Footprint, Timing, PipelinePrice]:
    """The largest stage, the memory of the ranks, and a step, with what data-parallel axes add.
    compute: seconds of a rank's own, without waits."""
    links, stages, microbatches = costs.machine.real_links, len(one.parts), one.microbatches
    memory, sends, data_seconds, updates = zip(*map(costs.of, one.parts))
    rank_sends = []
    pairs = list(zip([(0, 0), *one.sent], [*one.sent, (0, 0)]))
    for rank, own in enumerate(sends):
        found = dict(own)
        over = [each for pair in pairs[rank::stages] for each in pair]
        took = sum(links["pp"].seconds(*each) for each in over)
        nbytes, messages = map(sum, zip(*over))
        found["pp"] = Traffic(microbatches * nbytes, microbatches * took, microbatches * messages)
        rank_sends.append(found)
    busy, data_time = one.times.seconds * (1 - one.times.idle), max(data_seconds)
    update = max(updates)
    axes = dict.fromkeys(axis for each in rank_sends for axis in each)
    most = {
        axis: max((r[axis] for r in rank_sends if axis in r), key=lambda t: t.nbytes)
        for axis in axes
    }
    largest = max(range(stages), key=lambda stage: memory[stage].total)
    step = one.times.seconds + data_time + update
    return (
        one.parts[largest],
        memory[largest],
        Timing(step, compute, busy - compute + data_time, update, most),
        PipelinePrice(
            microbatches=microbatches,
            idle=one.times.idle,
            order=one.order,
            seconds=one.seconds,
            memory=memory,
            sent_bytes=tuple(nbytes for nbytes, _ in one.sent),
            again=max(one.chosen.values(), key=lambda each: each.seconds, default=None),
        ),
    )


class GraphStages:
    """One planned graph, on a rank of the inner mesh, and its cuts."""

    def __init__(
        self,
        planned: Planned,
        whole: Profile,
        frontier: Frontier,
        machine: Cluster,
        training: Training,
        cuts: Cuts | None,
    ) -> None:
        """cuts: those made so far; None: nothing is computed again."""
        whole = replace(whole, fusing=None)  # nothing is one operator with collectives in a stage
        self.planned, self.whole, self.frontier = planned, whole, frontier
        self.saving = Saving(planned.serial, planned.decisions, whole.n)
        self.machine = machine
        results = planned.serial.graph.output_node().all_input_nodes
        self.losses = sum(map(is_loss, results))
        self.nodes: list[fx.Node] = list(planned.serial.graph.nodes)
        outer = planned.outer
        self.ranks = {"cp": 1 if outer is None else outer.axis.size, "tp": whole.n}
        given = planned, whole.n, machine, training
        self.choices = None if cuts is None else StageChoices(*given, cuts)
        self._durations: dict[tuple[object, ...], Duration] = {}
        self._scheduled: dict[tuple[int, int, StageOrder, int, Link], Scheduled | None] = {}

    def can_run(self) -> bool:
        """Whether a search tries pipelines of the model: it returns a scalar loss, and writes to
        nothing."""
        return self.losses > 0 and not self.planned.serial.meta.get(MUTATED)

    def price(
        self,
        mesh: Mapping[str, int],
        layout: Layout,
        training: Training,
        microbatches: int,
        limit: int,
        order: StageOrder,
    ) -> tuple[Profile, Footprint, Timing, PipelinePrice] | None:
        """The largest stage, the memory of its ranks, and a step, in which each computes again what
        it must to hold at most `limit` bytes. None: no such cut, or no such order."""
        if self.losses != 1:  # backwards await the gradients of outputs
            order = "gpipe", order[1]
        link = self.machine.on(mesh).real_links["pp"]
        key = mesh["pp"], microbatches, order, layout.experts, link
        if key not in self._scheduled:
            self._scheduled[key] = self._schedule(*key)
        one = self._scheduled[key]
        if one is None:
            return None
        axes, machine = {**self.ranks, **layout.ranks}, self.machine.on(mesh)
        given = (axes, machine, replace(layout, staged=True), training, microbatches)
        costs = RankCosts(*given)
        if self.choices is not None:
            one = self._within(one, [costs.of(part).memory for part in one.parts], limit)
        return step_of(one, costs, microbatches * self.whole.compute / mesh["pp"])

    @cached_property
    def crossing(self) -> list[tuple[int, int]]:
        """What a rank sends where the graph is cut before each node: bytes, and messages, one for
        each value; (-1, 0): no cut may be."""
        own = set(self.planned.parameters)
        for node in self.nodes:
            if node.op == "call_function" and not own.isdisjoint(node.all_input_nodes):
                own.add(node)
        alive = crossing(self.nodes, own.difference(self.planned.parameters))
        found = [(-1, 0)] * len(self.nodes)
        state = self.planned.decisions.state
        nbytes = cache(lambda node: self.saving.nbytes(node, state(node)))
        for i in places(self.nodes, alive):
            if size := sum(map(nbytes, alive[i])):
                found[i] = size, len(alive[i])
        return found

    @cached_property
    def places(self) -> list[int]:
        """Where a cut may be: the places at which least is sent."""
        sent = {i: nbytes for i, (nbytes, _) in enumerate(self.crossing) if nbytes >= 0}
        return cheap_places(sent, _MOST_PLACES)

    @cached_property
    def kept(self) -> tuple[list[int], list[int], list[Counter[int]]]:
        """At each node: bytes kept for the backward, those there beside them while it is
        differentiated, and those computed again, by region of activation checkpointing."""
        place = {node: i for i, node in enumerate(self.nodes)}
        kept, beside = [0] * len(self.nodes), [0] * len(self.nodes)
        again: list[Counter[int]] = [Counter() for _ in self.nodes]
        for one, saved, repeated in self.frontier.kept():
            i = place[one.key[0]]
            kept[i] += saved
            if one.held:
                beside[i] = max(beside[i], one.nbytes * (1 if saved else 2))
            if one.again >= 0:
                again[i][one.again] += repeated
        return kept, beside, again

    def _schedule(
        self, ranks: int, microbatches: int, order: StageOrder, experts: int, link: Link
    ) -> Scheduled | None:
        """The stages of the cheapest cut, whatever the other data-parallel axes; None: too few
        places, or micro-batches."""
        ends, (schedule, chunks) = [0, *self.places, len(self.nodes)], order
        stages, shape = ranks * chunks, ScheduleShape(ranks, microbatches, chunks)
        if len(ends) - 1 < stages or not is_possible(schedule, shape):
            return None
        axes = {**self.ranks, "ep": experts}
        sent, *waits = waits_of(self.whole, axes, self.machine.on(axes).real_links)
        each = list(map(sum, zip(self.whole.forward, self.whole.backward, *waits)))
        units = Chain(
            seconds=[sum(each[a:b]) for a, b in zip(ends, ends[1:])],
            sent=[0.0, *(link.seconds(*self.crossing[i]) for i in self.places), 0.0],
            kept=[0.0] * (len(ends) - 1),
        )
        found = cut_stages(units, stages, microbatches)
        if found is None:
            return None
        cuts = [ends[i] for i in found.cuts]
        spans = list(zip([0, *cuts], [*cuts, len(self.nodes)]))
        live = [kept_at_once(schedule, shape, rank) for rank in range(ranks)]
        parts = [
            self.part(a, b, live[stage % ranks][stage // ranks], sent)
            for stage, (a, b) in enumerate(spans)
        ]
        over = [link.seconds(*self.crossing[cut]) for cut in cuts]
        forward = [
            sum(part.forward) + sum(waits[0][a:b]) + before
            for part, (a, b), before in zip(parts, spans, [0.0, *over])
        ]
        backward = [
            sum(part.backward) + sum(waits[1][a:b]) + after
            for part, (a, b), after in zip(parts, spans, [*over, 0.0])
        ]
        return Scheduled(
            parts=[joined(parts[rank::ranks]) for rank in range(ranks)],
            sent=tuple(self.crossing[cut] for cut in cuts),
            seconds=tuple(zip(forward, backward)),
            times=self.takes(order, microbatches, forward, backward),
            stages=tuple(
                StageSpan(a, b, live[s % ranks][s // ranks]) for s, (a, b) in enumerate(spans)
            ),
            microbatches=microbatches,
            order=order,
        )

    def takes(
        self,
        order: StageOrder,
        microbatches: int,
        forward: Sequence[float],
        backward: Sequence[float],
    ) -> Duration:
        """How long stages of these seconds take; asked again by each data-parallel layout."""
        key, (schedule, chunks) = (order, microbatches, *forward, *backward), order
        if key not in self._durations:
            self._durations[key] = duration(schedule, microbatches, forward, backward, chunks)
        return self._durations[key]

    def _within(self, one: Scheduled, held: Sequence[Footprint], limit: int) -> Scheduled:
        """Stages that compute again what their rank needs to hold at most `limit` bytes; the least
        where that is not enough. held: by each rank. What a stage receives it keeps anyway."""
        assert self.choices is not None
        ranks, parts = len(one.parts), list(one.parts)
        seconds, chosen = list(one.seconds), dict[int, Recomputation]()
        for rank, (part, own) in enumerate(zip(one.parts, held)):
            free = part.activations
            beside = own.total - free.saved
            if (own.total <= limit and not self.choices.regions) or beside > limit:
                continue
            stages = one.stages[rank::ranks]
            received = sum(s.live * max(0, self.crossing[s.start][0]) for s in stages if s.start)
            room = limit - beside - received
            found = self.choices.choose(stages, room, one.microbatches)
            if found is None:
                continue
            points, chosen[rank] = found
            for number, point in zip(range(rank, len(seconds), ranks), points):
                forward, backward = seconds[number]
                seconds[number] = forward, backward + point.seconds
            saved = received + chosen[rank].kept
            transient = free.transient + chosen[rank].peak - chosen[rank].kept
            parts[rank] = replace(part, activations=SavedForBackward(saved, transient))
        if not chosen:
            return one
        times = self.takes(one.order, one.microbatches, *zip(*seconds))
        return replace(one, parts=parts, seconds=tuple(seconds), times=times, chosen=chosen)

    def part(self, a: int, b: int, live: int, sent: Sequence[Sent]) -> Profile:
        """The profile of the operators from a to b - 1, with the activations of `live`
        micro-batches. sent: by the operators of the whole graph."""
        kept, beside, again = self.kept
        regions = Counter[int]()
        for each in filter(None, again[a:b]):
            regions.update(each)
        saved = SavedForBackward(
            saved=live * sum(kept[a:b]),
            transient=max(regions.values(), default=0) + max(beside[a:b], default=0),
        )
        return replace(
            self.whole,
            forward=self.whole.forward[a:b],
            backward=self.whole.backward[a:b],
            sent=tuple(s._replace(at=s.at - a) for s in sent if a <= s.at < b),
            weights=tuple(
                replace(weight, use=weight.use - a)
                for weight in self.whole.weights
                if weight.use is not None and a <= weight.use < b
            ),
            activations=saved,
        )
