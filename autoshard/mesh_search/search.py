"""`autoshard.search_meshes`: every mesh of a world, planned and priced without starting a process.

The model is captured once. Each size of the axis tp, and of cp, is planned once, by the exact
solver, and serves all ways to split the rest of the world into `dp_replicate` x `dp_shard`, which
follow from the mesh (planning/estimate/mesh.py). So does one plan for all sizes of ep, on which
rows travel to experts that stay; meshes with it are priced where there are such experts.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx, nn

from autoshard.building import Planned, batch_facts, plan_captured
from autoshard.capture import capture, intercept
from autoshard.compiling import lowered_dtypes, say_stored, use_by
from autoshard.config import Config
from autoshard.errors import ConfigError, message
from autoshard.planning import Plan, Recomputation
from autoshard.planning.cost import DEFAULT_HARDWARE, Cluster, cluster
from autoshard.planning.estimate import (
    Footprint,
    Frontier,
    Layout,
    Profile,
    Timing,
    Training,
    footprint,
    frontier,
    profile,
    timing,
    with_recomputation,
)
from autoshard.runtime import compat
from autoshard.runtime.mesh import PLANNED, offline_mesh
from autoshard.runtime.operators import PRODUCTS
from autoshard.runtime.parameters import casting

AxisSizes = dict[str, int]

AXES = (*PLANNED, "ep")
"""The axes of which a mesh has one at most, beside `dp_replicate` and `dp_shard`."""


@dataclass(frozen=True, kw_only=True)
class MeshPrice:
    """One mesh: what a rank holds and how long a step takes.

    mesh: sizes of the axes above 1. memory, timing: of one rank, bytes and seconds. mfu: the
    model's own operations over what the world's devices could do in a step. unfit: why it does not
    fit, empty where it does. plan: the tp axis's decisions and the mesh, ready to `save`.
    recomputation: what is computed again in backward so that it fits; None: nothing is.
    """

    mesh: AxisSizes
    memory: Footprint
    timing: Timing
    mfu: float
    unfit: str
    plan: Plan
    recomputation: Recomputation | None = None

    @property
    def fits(self) -> bool:
        """Whether a rank's memory holds it."""
        return not self.unfit


@dataclass(frozen=True)
class MeshSearch:
    """All meshes tried: `rows`, those that fit first, then by the work a second does."""

    rows: tuple[MeshPrice, ...]
    cluster: Cluster
    world: int

    @property
    def best(self) -> MeshPrice | None:
        """The recommendation; None where nothing fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None


def search_meshes(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world: int,
    hardware: str | Cluster = DEFAULT_HARDWARE,
    mesh: Mapping[str, int] | None = None,
    training: Training | None = None,
    batches: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> MeshSearch:
    """Try the meshes of `world` ranks for training `model` on batches like `args` and `kwargs`.

    model, args, kwargs: as for `autoshard.trace`; on the meta device nothing is allocated. The
        batch is that of one data-parallel rank.
    hardware: a key of `planning.cost.HARDWARE`, a cluster file, or a Cluster. mesh: only this
        one, instead of all factorisations with tp, cp or, where rows can travel to experts, ep
        inside a node. training: dtypes and optimizer.
    batches: how many different batches the world is given, where that is less than one for each
        data-parallel rank: the others repeat work. progress: called with (what begins, its number,
        steps in all). options: any other field of `autoshard.Config`; `memory_budget` is of the
        whole rank.

    Raises ConfigError for a mesh that does not fit the world, and what `trace` raises.
    """
    machine = cluster(hardware)
    meshes = [_checked(mesh, world)] if mesh is not None else candidates(world, machine, AXES)
    settings = Config.from_options(options)

    def search(
        gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> MeshSearch:
        say("capturing", 2, steps)
        captured = capture(gm, example_inputs, lowered_dtypes(inputs))
        return search_captured(
            captured, inputs, meshes, machine, settings, training, batches, progress
        )

    # Whether rows can travel to experts is known when the graph is captured.
    plain = [one for one in meshes if "ep" not in one]
    steps = len({_planned_for(one) for one in plain or meshes}) + 2
    say = progress or _silent
    say("tracing", 1, steps)
    use = use_by(settings, None)
    with _no_collector(), contextlib.nullcontext() if use.param is None else casting(model, use):
        found = intercept(model, args, kwargs, search)
    return found


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Hold the cycle collector: a fifth of the time goes into scanning graphs that all live on."""
    held = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if held:
            gc.enable()


def search_captured(
    captured: fx.GraphModule,
    inputs: list[compat.GraphInput],
    meshes: Sequence[AxisSizes],
    machine: Cluster,
    config: Config,
    training: Training | None = None,
    batches: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> MeshSearch:
    """`search_meshes`, of a serial graph that is captured already; `captured` stays as it is.

    inputs: whose parameters may be read in another dtype than they are stored in (`lowered`).
    """
    training = training or Training()
    # the budget is one of the whole rank: rows are held to it, not the plan of the tp axis alone
    limit, config = config.memory_budget, replace(config, memory_budget=None)
    limit = limit or machine.usable_bytes
    if len(meshes) > 1 and not any(str(n.target) in PRODUCTS for n in captured.graph.nodes):
        meshes = [mesh for mesh in meshes if "ep" not in mesh]
    sizes, facts = list(dict.fromkeys(map(_planned_for, meshes))), batch_facts(inputs)
    rows: list[MeshPrice] = []
    for done, key in enumerate(sizes):
        axes, experts = dict(key[0]), key[1]
        told = "ep" if experts else " x ".join(f"{name}={n}" for name, n in axes.items())
        (progress or _silent)(f"planning {told}", done + 3, len(sizes) + 2)
        serial = copied(captured)
        say_stored(serial, inputs, config)
        device, mixed = machine.planned(axes), {"ep": 2} if experts else {}
        first = offline_mesh({**mixed, **axes}, 0)
        planned = plan_captured(serial, inputs, first, config, device, facts=facts)
        choices = _Choices(planned, first.planned.size, machine, config.bucket_bytes, training)
        for mesh in meshes:
            if _planned_for(mesh) == key and _is_useful(mesh, choices.free, len(meshes)):
                layout = Layout.of(mesh, config.zero, config.bucket_bytes)
                one, chosen = choices.within(limit, layout)
                held = footprint(one, layout, training)
                took = timing(one, layout, training, machine, machine.links(mesh))
                rows.append(
                    MeshPrice(
                        mesh=dict(mesh),
                        memory=held,
                        timing=took,
                        mfu=training.microbatches * _utilisation(one, layout, took.step, batches),
                        unfit=_unfit(held, limit, layout, one),
                        plan=replace(planned.plan, mesh=dict(mesh)),
                        recomputation=chosen,
                    )
                )
    # the same work in every row where the batch is; utilisation counts it either way
    rows.sort(key=lambda row: (not row.fits, -row.mfu))
    return MeshSearch(tuple(rows), machine, math.prod(meshes[0].values()))


class _Choices:
    """The profile of one planned graph, as it is and with what is computed again."""

    def __init__(
        self,
        planned: Planned,
        n: int,
        machine: Cluster,
        bucket_bytes: int | None,
        training: Training,
    ) -> None:
        self.planned, self.n, self.machine, self.training = planned, n, machine, training
        graph = (planned.serial, planned.decisions, planned.parameters)
        self.free = profile(*graph, n, machine, bucket_bytes, training)

    @cached_property
    def frontier(self) -> Frontier:
        """Less memory for more time."""
        graph = (self.planned.serial, self.planned.decisions)
        return frontier(*graph, self.n, self.machine, self.training)

    def within(self, limit: int, layout: Layout) -> tuple[Profile, Recomputation | None]:
        """The quickest that holds at most `limit` bytes; the smallest where none does. Regions of
        activation checkpointing are computed again as the model has it."""
        held = footprint(self.free, layout, self.training)
        regions = any("ac_graph_id" in node.meta for node in self.planned.serial.graph.nodes)
        if held.total <= limit and not regions:
            return self.free, None
        beside = held.total - self.free.activations.saved
        points = self.frontier.points
        index = self.frontier.cheapest(limit - beside)
        if not points or (index is None and beside > limit):
            return self.free, None  # weights alone are too much
        chosen = self.frontier.recomputation(len(points) - 1 if index is None else index)
        # regions of the model's own spare bytes too, which the frontier begins without
        spared = max(0, self.free.activations.saved - chosen.kept)
        chosen = replace(chosen, spared=spared)
        return with_recomputation(self.free, chosen), chosen


def _planned_for(mesh: AxisSizes) -> tuple[tuple[tuple[str, int], ...], bool]:
    """The axes that the planner decides on, names and sizes; whether there is an axis ep."""
    sharing = offline_mesh(mesh, 0).sharing
    return tuple((axis.name, axis.size) for axis in sharing), mesh.get("ep", 1) > 1


def _is_useful(mesh: AxisSizes, one: Profile, of: int) -> bool:
    """Whether a mesh is more than its neighbour: with ep, whether rows travel to experts. What is
    asked for alone is priced."""
    ep = mesh.get("ep", 1)
    return of == 1 or ep == 1 or any(mixture.on(ep) for mixture in one.exchanges)


def _silent(what: str, done: int, total: int) -> None:
    pass


def candidates(world: int, machine: Cluster, planned: Sequence[str] = ("tp",)) -> list[AxisSizes]:
    """Every dp_replicate x dp_shard x one of `planned` that multiplies to `world`, with the last
    inside a node.

    Across nodes a tp axis would send whole activations, several times a layer, over the slower
    network, and ep rows: name such a mesh to see it.
    """
    found = []
    for n in _divisors(world):
        if n > 1 and machine.per_node % n:
            continue
        for name in planned if n > 1 else ("tp",):
            for shard in _divisors(world // n):
                found.append(_named(world // n // shard, shard, name, n))
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _named(replicate: int, shard: int, name: str, n: int) -> AxisSizes:
    sizes = {"dp_replicate": replicate, "dp_shard": shard, name: n}
    return {name: size for name, size in sizes.items() if size > 1} or {"tp": 1}


def _checked(mesh: Mapping[str, int], world: int) -> AxisSizes:
    sizes = {axis.name: axis.size for axis in offline_mesh(mesh, 0).axes}
    if math.prod(sizes.values()) != world:
        spelled = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            message(
                f"the mesh {spelled} has {math.prod(sizes.values())} ranks, the world {world}",
                remedy="Give sizes whose product is the world.",
            )
        )
    return sizes


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a captured graph that passes may rewrite; the values are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))  # type: ignore[arg-type]
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def _utilisation(one: Profile, layout: Layout, step: float, batches: int | None) -> float:
    """The model's operations over those the devices could do in a step; 0 for an empty step."""
    copies = layout.batches
    useful = min(copies, batches or copies)
    return useful * one.flops / (step * copies * one.n * one.peak) if step else 0.0


def _unfit(held: Footprint, limit: int, layout: Layout, one: Profile) -> str:
    """Why a rank's memory does not hold it, with the numbers and what would help."""
    if held.total <= limit:
        return ""
    states = held.parameters + held.gradients + held.optimizer
    split = layout.shard * one.n
    if states > held.activations:
        why = f"parameters and their states alone are {states / 1e9:.3g}"
    else:
        again = ", with all recomputed that can be" if held.activations else ""
        why = f"activations are {held.activations / 1e9:.3g}{again}"
    takes = [f"devices that hold {held.total / 1e9:.3g} GB of tensors"]
    room = limit - (held.total - held.activations)
    if room > 0:
        parts = math.ceil(held.activations / room)
        takes.append(f"a batch {parts} times smaller, in {parts} microbatches")
    if (room := limit - (held.total - states)) > 0:
        ranks = math.ceil(split * states / room)
        takes.append(f"{ranks} ranks that share the parameters, instead of {split}")
    return f"{held.total / 1e9:.3g} of {limit / 1e9:.3g} GB: {why}; it takes {', or '.join(takes)}"
