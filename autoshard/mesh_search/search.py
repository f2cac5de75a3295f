"""`autoshard.search_meshes`: every mesh of a world, planned and priced without starting a process.

The model is captured once. Each size of the axis tp, and of cp, is planned once, by the exact
solver, and serves all ways to split the rest of the world into `dp_replicate` x `dp_shard`, which
follow from the mesh (planning/estimate/mesh.py); with zero="auto", where the plan knows of them,
each mesh is planned. So is each size of ep, whose meshes are priced where rows travel to experts.
With pp the plan is that of the mesh of a stage (stages.py).
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import fx, nn

from autoshard.building import Planned, ask, batch_facts
from autoshard.capture import capture, intercept, of_batch, of_marked_batch
from autoshard.config import Config
from autoshard.errors import AutoshardError, ConfigError
from autoshard.mesh_search.deep_graphs import Shallow, copied, experts_of, shallow
from autoshard.mesh_search.equal_layers import Priced, worth_a_plan
from autoshard.mesh_search.factorisations import (
    Asked,
    AxisSizes,
    PlanAxes,
    candidates,
    checked,
    combined,
    planned_axes,
)
from autoshard.mesh_search.placements import Placements, within_memory
from autoshard.mesh_search.prices import MeshPrice, MeshPrices, MeshSearch
from autoshard.parameters import lowered_dtypes, say_stored, use_by
from autoshard.planning import Decisions, Plan, Prices, fingerprint
from autoshard.planning.chunked_loss import chunking_of
from autoshard.planning.cost import DEFAULT_HARDWARE, Cluster, cluster
from autoshard.planning.estimate import Cuts, Training
from autoshard.runtime import compat
from autoshard.runtime.mesh import PLANNED, offline_mesh
from autoshard.runtime.operators import PRODUCTS
from autoshard.runtime.parameters import casting

PlansMade = dict[tuple[int, PlanAxes, int], tuple[Planned, list[Decisions]]]
"""By the size of a micro-batch, the axes and the id of the decisions that are followed (a plan of
the same dictionary holds them, so that no others have it): the cheapest plan, and those at dearer
bytes."""

AXES = (*PLANNED, "ep")
"""The axes of which a mesh has one at most, beside `dp_replicate` and `dp_shard`."""


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
    global_batch: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    otherwise: Callable[[MeshSearch], Iterable[dict[str, Any]]] = lambda found: (),
    **options: Any,
) -> MeshSearch:
    """Try the meshes of `world` ranks for training `model` on batches like `args` and `kwargs`.

    model, args, kwargs: as for `autoshard.trace`; on the meta device nothing is allocated. The
        batch is that of one data-parallel rank.
    hardware: the name of a built-in cluster, a file, or a Cluster. mesh: only this
        one, instead of all factorisations with tp, cp or, where rows can travel to experts, ep
        inside a node, those with cp and tp, or ep and tp, together, with ep across nodes, and all
        these beside pp between nodes. Of a deep model those that are worth it by the prices of its
        layers. training: dtypes and optimizer.
    batches: how many different batches the world is given, where that is less than one for each
        data-parallel rank: the others repeat work. global_batch: samples of a step in the world,
        in micro-batches of the size that is best for each mesh, whatever that of `args` and
        `kwargs` and the microbatches of `training`. progress: called with (what begins, its number,
        steps in all). options: any other field of `autoshard.Config`; `memory_budget` is of the
        whole rank. otherwise: other options for what was found, such as of memory, which do not
        change the trace: those are taken that first find what fits.

    Raises ConfigError for a mesh that does not fit the world, and what `trace` raises.
    """
    machine = cluster(hardware)
    settings = Config.from_options(options)

    def search(
        gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> MeshSearch:
        say("capturing", 2, steps)
        captured = capture(gm, example_inputs, lowered_dtypes(inputs))
        short = shallow(captured, inputs) if mesh is None else None
        more = combined(world, machine, experts_of(captured)) if mesh is None else []
        cuts, whole, layers = Cuts(), PlansMade(), PlansMade()
        every = [*meshes, *more]

        def searched(options: dict[str, Any]) -> MeshSearch:
            chosen, config = None, Config.from_options(options)
            # of these a plan whose memory is not bounded knows nothing
            same = replace(config, chunk_loss=settings.chunk_loss, host_memory=settings.host_memory)
            known = same == settings and config.zero != "auto"
            given = (machine, config, training, batches, progress, global_batch)
            if short is not None:
                say("comparing meshes by a layer", 2, steps)
                asked = _asked(*given[:4], len(every), global_batch, cuts)
                chosen = _worth_a_plan(every, short, asked, machine, layers if known else {})
            plans = whole if known else {}
            found = search_captured(captured, inputs, every, *given, chosen, cuts, plans)
            return replace(found, options=options)

        found = searched(options)
        for each in otherwise(found):
            with contextlib.suppress(AutoshardError):  # a mesh that does not go with them
                if (other := searched(each)).best is not None:
                    return other
        return found

    asked_for = [checked(mesh, world)] if mesh is not None else None
    meshes = asked_for or candidates(world, machine, AXES, stages=True)
    # Whether rows can travel to experts is known when the graph is captured.
    plain = [one for one in meshes if "ep" not in one] or meshes
    plain = plain if mesh else [*plain, *combined(world, machine)]
    steps = _steps({planned_axes(one, settings) for one in plain}, plain)
    say = progress or _silent
    say("tracing", 1, steps)
    use = use_by(settings, None)
    if global_batch is not None:
        args, kwargs = of_marked_batch(model, args, kwargs)
    with _no_collector(), contextlib.nullcontext() if use.param is None else casting(model, use):
        found = intercept(model, args, kwargs, search)
    return found


def _worth_a_plan(
    meshes: Sequence[AxisSizes], short: Shallow, asked: Asked, machine: Cluster, plans: PlansMade
) -> dict[int, list[AxisSizes]]:
    """The meshes of a deep graph that are best by what its layers cost, by the micro-batch; without
    pp, every split of the data-parallel ranks."""

    def of(one: Asked) -> tuple[Shallow, Priced]:
        graph, inputs = of_batch(short.graph, short.inputs, one.samples and one.batch)

        def priced(key: PlanAxes, outer: Decisions | None) -> MeshPrices:
            return prices_of(graph, inputs, key, machine, one, outer=outer, plans=plans)

        return replace(short, graph=graph, inputs=inputs), priced

    chosen: dict[int, list[AxisSizes]] = {}
    for one in worth_a_plan(meshes, asked, of):
        alike = [m for m in meshes if "pp" not in m and planned_axes(m, asked.config) == one.plan]
        chosen.setdefault(one.batch, []).extend([one.mesh] if "pp" in one.mesh else alike)
    return chosen


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
    samples: int | None = None,
    chosen: Mapping[int, Sequence[AxisSizes]] | None = None,
    cuts: Cuts | None = None,
    plans: PlansMade | None = None,
) -> MeshSearch:
    """`search_meshes`, of a serial graph that is captured already; `captured` stays as it is.

    inputs: whose parameters may be read in another dtype than they are stored in (`lowered`).
    samples: `global_batch`, where the graph is one of a marked batch. chosen: those of `meshes`
    that are planned, by the size of a micro-batch; None: all, with a larger one while that is
    quicker. cuts, plans: those made so far, to which it adds; plans with options that differ in
    `chunk_loss` and `host_memory` alone.
    """
    asked = _asked(machine, config, training, batches, len(meshes), samples, cuts)
    world = math.prod(meshes[0].values())
    if chosen is not None:
        meshes = [mesh for some in chosen.values() for mesh in some]
    elif len(meshes) > 1 and not any(str(n.target) in PRODUCTS for n in captured.graph.nodes):
        meshes = [mesh for mesh in meshes if "ep" not in mesh]
    keys = {_key(mesh): planned_axes(mesh, asked.config) for mesh in meshes}
    rows: dict[object, MeshPrice] = {}
    placements: dict[object, Placements] = {}
    plans = {} if plans is None else plans
    steps, numbers, larger = _steps(set(keys.values()), meshes), count(3), list(meshes)

    def say(what: str) -> None:
        (progress or _silent)(what, min(next(numbers), steps - 1), steps)

    for size in asked.sizes:
        one = replace(asked, batch=size)
        some = [m for m in (larger if chosen is None else chosen.get(size, ())) if one.count(m)]
        if not some:
            continue
        graph, larger = of_batch(captured, inputs, samples and size), []
        for key in dict.fromkeys(keys[_key(mesh)] for mesh in some):
            say("planning " + " x ".join(f"{name}={n}" for name, n in key))
            try:
                choices = prices_of(*graph, key, machine, one, plans=plans)
            except AutoshardError:
                if len(dict(key)) == 1 or asked.meshes == 1:
                    raise
                continue  # an option that these axes do not have together
            own = Placements(choices, plans[size, key, id(None)][1])
            for mesh in some:
                # with ep no more than its neighbour where rows do not travel to experts
                travels = mesh.get("ep", 1) == 1 or choices.free.exchanges
                if keys[at := _key(mesh)] != key or not (asked.meshes == 1 or travels):
                    continue
                row = choices.staged(mesh) if "pp" in mesh else choices.row(mesh)
                if row is None or (at in rows and not row.is_quicker(rows[at])):
                    continue
                rows[at], placements[at] = row, own
                larger += [mesh] * row.fits
    if not rows and samples:
        why = f"a global batch of {samples} is no whole number of samples a rank on any mesh"
        raise ConfigError(why, remedy="Give one that is.")
    tried = [(row, placements[at]) for at, row in rows.items() if not row.pipeline]
    found = within_memory(tried, [row for row in rows.values() if row.pipeline], say)
    (progress or _silent)("comparing", steps, steps)
    return MeshSearch.of(found, machine, world)


def _asked(
    machine: Cluster,
    config: Config,
    training: Training | None,
    batches: int | None,
    meshes: int,
    samples: int | None = None,
    cuts: Cuts | None = None,
) -> Asked:
    training = training or Training()
    if config.optimizer_states == "host":
        training = replace(training, states="host")
    # the budget is one of the whole rank: rows are held to it, not the plan of the tp axis alone
    limit, config = config.memory_budget, replace(config, memory_budget=None)
    losses = chunking_of(config.chunk_loss, limit is not None or machine.device.kind != "cpu")
    limit = limit or machine.usable_bytes
    made = {} if cuts is None else cuts
    return Asked(config, training, limit, batches, meshes, losses, samples, cuts_made=made)


def prices_of(
    captured: fx.GraphModule,
    inputs: list[compat.GraphInput],
    key: PlanAxes,
    machine: Cluster,
    asked: Asked,
    prices: Prices | None = None,
    outer: Decisions | None = None,
    plans: PlansMade | None = None,
) -> MeshPrices:
    """The plan of the axes that `planned_axes` says of a mesh, with what prices it. prices: of a
    stored byte, in place of the defaults. outer: the plan of cp of another micro-batch, to follow
    where tp is planned beside it. plans: those made so far of this graph, of other losses and
    another host, to which it adds. Raises PlanError where it is not possible."""
    plans, at = {} if plans is None else plans, (asked.batch, key, id(outer))
    if not (known := at in plans):
        plans[at] = _planned(captured, inputs, key, machine, asked, prices, outer), []
    planned, _ = plans[at]
    first, to_fit = asked.losses
    request = replace(planned.request, chunking=first, chunking_to_fit=to_fit)
    request = replace(request, host_memory=asked.config.host_memory)
    planned = replace(planned, request=request)
    if known:
        without_budget, _ = chunking_of(asked.config.chunk_loss, False)
        planned = planned.following(planned.chunked(without_budget).decisions)
    return MeshPrices(planned, planned.decisions.prices.n, machine, asked)


def _planned(
    captured: fx.GraphModule,
    inputs: list[compat.GraphInput],
    key: PlanAxes,
    machine: Cluster,
    asked: Asked,
    prices: Prices | None,
    outer: Decisions | None,
) -> Planned:
    axes, config = dict(key), asked.config
    # beside pp, cp alone is planned as it is beside tp
    stages = {"pp": 2} if axes.get("tp") == 1 and "cp" in axes else {}
    serial = copied(captured)
    say_stored(serial, inputs, config)
    first = offline_mesh({**stages, **axes}, 0)
    # a plan with choices uses the memory that there is; a stage is a part of its graph
    room = asked.limit if config.zero == "auto" and axes.get("pp", 1) == 1 else None
    made = ask(
        serial,
        inputs,
        first,
        config,
        machine.on(first.sizes),
        facts=batch_facts(inputs),
        room=room,
        training=asked.training_on(axes),
    )
    if prices is not None:
        made = replace(made, request=replace(made.request, prices=prices))
    if outer and first.outer and not made.request.plan:
        graphs = {fingerprint(made.serial): outer.graph_plan()}
        of_outer = Plan(first.outer.name, first.outer.size, graphs=graphs)
        plan = Plan(made.request.axis, first.planned.size, outer=of_outer)
        made = replace(made, request=replace(made.request, plan=plan))
    return made.plan().recomputing(None)  # which is a row's own


def _key(mesh: AxisSizes) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(mesh.items()))


def _steps(sizes: Collection[object], meshes: Sequence[AxisSizes]) -> int:
    """The most that a search does: trace, capture, plan each size, fit each mesh, compare."""
    return len(sizes) + len(meshes) + 3


def _silent(what: str, done: int, total: int) -> None: ...
