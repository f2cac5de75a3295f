"""What Dynamo calls for a graph on a mesh with pp.

Data-parallel ranks beside the stages of a pipeline: what they gather and reduce.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.building.all_ranks import (
    agree_on_program,
    compared,
    digest_of,
    tensors_of,
    unplanned,
)
from autoshard.building.batch_check import batch_checker
from autoshard.building.pipeline.microbatch import shared_graph
from autoshard.building.pipeline.program import PipelineProgram, build_pipeline
from autoshard.building.pipeline.rank import rank_pipeline
from autoshard.building.pipeline.stage_memory import fit_stages, lines_of_recomputation
from autoshard.capture import capture, global_fake
from autoshard.compiling import compile_local
from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.parameters import store_at_home, traced_microbatch, use_by
from autoshard.planning import views_among
from autoshard.planning.cost import cluster_of, default_bucket_bytes, fill_buckets
from autoshard.runtime import compat
from autoshard.runtime.agreement import CollectiveRegion, agree, gather
from autoshard.runtime.collectives import Axis, I, gathering_axes, home_rank, shard_dim
from autoshard.runtime.compat import artifact
from autoshard.runtime.graph_meta import MUTATED, REWRITTEN
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.mesh import Mesh, groups_of
from autoshard.runtime.parameters import (
    ACCUMULATE,
    Arrivals,
    EagerValues,
    ParameterPolicy,
    StageParameters,
    StageUnsharding,
    check_copies,
    deferred_at,
    give_back,
    in_one_memory,
    is_eager_value,
    stored_states,
)
from autoshard.runtime.pipeline import (
    GroupChannel,
    RankPipeline,
    awaiting_gradients,
    beside_loss,
    step_loss,
)


def stage_unsharding(
    program: PipelineProgram,
    parameters: Sequence[tuple[int, DTensor]],
    mesh: Mesh,
    config: Config,
    microbatch: str,
) -> tuple[StageUnsharding, CollectiveRegion]:
    """How the parameters that are at home on this rank's stage become whole for a call, and the
    region in which calls run.

    parameters: the stored ones, each by its place among the parameters of the graph.
    """
    stage, axes, use = mesh.axis("pp"), gathering_axes(mesh.axes), use_by(config, mesh)
    names = list(program.parameters.values())
    read = set(program.microbatch.parameters)
    computed = {i for i, node in enumerate(program.parameters) if node in read}
    own: list[int] = []
    for at, (i, parameter) in enumerate(parameters):
        states = stored_states(parameter)
        if i in computed and home_rank(states["pp"]) in (None, stage.rank):
            if parameter.requires_grad or any(states.get(axis.name, I) != I for axis in axes):
                own.append(at)
    nodes, at_rest = list(program.parameters), program.microbatch.at_rest()
    stays = {at: at_rest[node] for at in own if (node := nodes[parameters[at][0]]) in at_rest}
    given = [(parameters[at][1], stays.get(at)) for at in own]
    buckets = _buckets(given, axes, use, config)
    gathered: dict[str, list[str]] = {}
    reduced: dict[str, list[str]] = {}
    waits = deferred_at(axes, use) if microbatch == ACCUMULATE else None
    for number, axis in enumerate(axes):
        for at in own:
            i, parameter = parameters[at]
            if stays.get(at) == axis.name:
                continue
            if shard_dim(stored_states(parameter).get(axis.name, I)) is not None:
                gathered.setdefault(axis.name, []).append(names[i])
            if parameter.requires_grad and (waits is None or number > waits):
                reduced.setdefault(axis.name, []).append(names[i])
    if stays:  # first, where an error says it
        gathered["ep"] = [program.exchanges(), *gathered.get("ep", ())]
    met = (stage, *[axis for axis in axes if axis.name in gathered])
    region = CollectiveRegion("the schedule of a pipeline", mesh.axes, met, gathered)
    backward = CollectiveRegion("the backward of a pipeline", mesh.axes, moved=reduced)
    found = [[own[i] for i in bucket] for bucket in buckets]
    return StageUnsharding(axes, found, use, microbatch, backward, stays), region


def _buckets(
    parameters: Sequence[tuple[DTensor, str | None]],
    axes: Sequence[Axis],
    use: ParameterPolicy,
    config: Config,
) -> list[list[int]]:
    if not parameters or not axes:
        return []
    widths = [use.compute_dtype(p.dtype).itemsize for p, _ in parameters]
    sizes = [p.numel() * width for (p, _), width in zip(parameters, widths)]
    keys = [
        (p.dtype, p.requires_grad, tuple(stored_states(p).items()), stays)
        for p, stays in parameters
    ]
    ranks = math.prod(axis.size for axis in axes)
    members = ((width, ranks) for width in widths)
    limit = config.bucket_bytes or default_bucket_bytes(sum(sizes), members)
    return fill_buckets(sizes, keys, limit, before=config.bucket_bytes is None)


def pipelined(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    device: str,
) -> Callable[..., Any]:
    """The function of a graph's inputs that runs the pipeline; collective over the mesh.

    The first graph of a model stores its parameters, and is cut again.
    """
    if not any(isinstance(item.real, nn.Parameter) for item in inputs):
        return _on_wholes(gm, example_inputs, inputs, config)
    _hold_sizes(inputs)
    axis = mesh.axis("pp")
    sharing, machine = mesh.sharing[::-1], cluster_of(device)
    program = build_pipeline(gm, example_inputs, inputs, axis.size, config, machine, mesh.axes)
    artifact("autoshard_pipeline", lambda: "\n".join([*program.lines(), "", program.picture()]))
    serial, microbatch = program.microbatch.serial, traced_microbatch(gm)
    own = compared(
        serial,
        program.named,
        tensors_of(inputs),
        config,
        machine.name,
        microbatch,
        (),
        program.lines(),
    )
    new = unplanned(inputs, serial, program.placed())
    agree_on_program(serial, own, inputs, mesh, config, bool(new))
    if new:
        compat.store_in_trace(inputs, new, lambda: store_at_home(new, mesh, config))
        return pipelined(gm, example_inputs, inputs, mesh, config, device)
    train = torch.is_grad_enabled()  # Dynamo has a program for each mode
    with (
        _together(axis),
        compat.explicit_modes(True) if compat.autocast_is_on() else torch.enable_grad(),
    ):
        if train:
            fit_stages(program, [axis.rank], config)
        rank = rank_pipeline(program, axis, sharing, config.inner, train)
        again = lines_of_recomputation(program)
        for one in sharing:
            agree("compiled pipeline", digest_of(again), again, one)
    compat.lighten_guards({i.source: i.real for i in inputs if isinstance(i.real, nn.Parameter)})
    return _runner(program, rank, inputs, mesh, config, device, microbatch)


@contextlib.contextmanager
def _together(axis: Axis) -> Iterator[None]:
    """Nobody runs before everybody can, and where one stage cannot be traced (a mask decides the
    shape of its values), Dynamo breaks the graph on all ranks."""
    asked: Exception | None = None
    try:
        yield
    except compat.RESTARTS as error:
        asked = error
    own = None if asked is None else compat.kind_of_restart(asked)
    kinds = gather(own, "compiled pipeline", axis, alike=True)
    if asked is not None:
        raise asked
    for kind in kinds:
        if kind is not None:
            raise compat.restart_of(kind)


def _on_wholes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[compat.GraphInput],
    config: Config,
) -> Callable[..., Any]:
    """A graph without parameters, such as a loss behind a graph break: every rank runs it, on the
    wholes of what an earlier graph has returned, and of what eager code made of parameters."""
    reals = [item.real for item in inputs]
    returned = {i: I for i, real in enumerate(reals) if isinstance(real, LazyGather)}
    eager_values = EagerValues(reals, ())
    if eager_values.positions:
        eager_values = EagerValues(reals, capture(gm, example_inputs).meta[MUTATED])
    whole = {*returned, *eager_values.positions}
    fakes = [global_fake(x) if i in whole else x for i, x in enumerate(example_inputs)]
    for i in returned:
        fakes[i] = compat.no_leaf(fakes[i])  # the graph may write to it
    compiled, arrivals = compile_local(gm, fakes, config.inner), Arrivals(returned, returned)

    def run(*args: Any) -> Any:
        values = list(args)
        sources = eager_values.take(values)
        taken = arrivals.take(values)
        outputs = give_back(taken, compiled(*values))
        return eager_values.give_back(sources, outputs)

    return run


def _hold_sizes(inputs: Sequence[compat.GraphInput]) -> None:
    """Trace again with the sizes of this call where Dynamo made symbols of them: a cut is of sizes
    that are known. A number that changes is an error."""
    changing = [item for item in inputs if _changes(item)]
    names = {item.name for item in changing}  # a symbol has that of its tensor, or the offset's
    if compat.hold_sizes([i.real for i in inputs if i.real is not None and i.name in names]):
        raise compat.RestartTrace("pp cuts a graph of fixed sizes")
    for item in changing:
        raise ConfigError(
            f"{item.name} changes its size or value between calls, and pp cuts a graph of "
            "fixed sizes",
            remedy="Compile with torch.compile(dynamic=False): one program for each size.",
        )


def _changes(item: compat.GraphInput) -> bool:
    known = isinstance(item.real, torch.Tensor)
    return not known or any(isinstance(size, torch.SymInt) for size in item.fake.shape)


def _runner(
    program: PipelineProgram,
    rank: RankPipeline,
    inputs: Sequence[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    device: str,
    microbatch: str,
) -> Callable[..., Any]:
    axis = mesh.axis("pp")
    check = batch_checker(inputs, (axis, *mesh.sharing), config)
    places = program.microbatch.serial.graph.find_nodes(op="placeholder")
    stored = [i for i, node in enumerate(places) if node in program.parameters]
    results: Sequence[Any] = program.microbatch.serial.graph.output_node().args[0]  # type: ignore[assignment]
    made = {each.position for each in rank.results}
    others = _others(program, results, made)
    written, views = program.microbatch.written, views_among(program.microbatch.serial)
    rewritten = {i for i in written.values() if places[i].meta.get(REWRITTEN)}
    around = len(rank.stages) > 1
    channel = GroupChannel(axis, _device(device), groups_of(mesh, "pp"), around)
    eager_values = EagerValues([item.real for item in inputs], {*written.values()})
    read = [inputs[i].real for i in stored]
    split = [
        (at, p) for at, p in enumerate(read) if isinstance(p, DTensor) and not is_eager_value(p)
    ]
    unsharding, region = stage_unsharding(program, split, mesh, config, microbatch)
    together = mesh.axis("ep") if program.microbatch.at_rest() else None
    # the casts of autocast are in the graphs; Dynamo guards on it
    autocast = compat.autocast_is_on()
    modes = functools.partial(compat.explicit_modes, False) if autocast else contextlib.nullcontext
    waiting = CollectiveRegion("the backwards of a pipeline", mesh.axes, (axis,))

    @contextlib.contextmanager
    def backwards() -> Iterator[None]:
        with waiting, modes():
            yield

    def run(*args: Any) -> Any:
        check_copies()
        taken = list(args)
        sources = eager_values.take(taken)
        values = list(taken)
        if check is not None:
            check(values)
        if rank.loss is None:  # a backward to come reads what was there
            for i in written.values():
                values[i] = taken[i].clone()
        given = [values[i] for i in stored]
        with region, modes():
            parameters = _unsharded(given, unsharding)
            for i, parameter in zip(stored, parameters.values):
                values[i] = parameter.detach()
            found = _call(rank, channel, parameters, values, together, backwards)
            found.update(others(values, given))
        for position, i in written.items():
            with contextlib.nullcontext() if i in rewritten else torch.no_grad():
                taken[i].copy_(found.pop(position))
        left = (i for i in range(len(results)) if i not in written)
        outputs = in_one_memory(
            [found.get(i, results[i]) for i in left], views, [args[i] for i in written.values()]
        )
        return eager_values.give_back(sources, outputs)

    return run


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _unsharded(parameters: Sequence[Any], unsharding: StageUnsharding) -> StageParameters:
    """What this rank reads of its stage's parameters, and the rowless parts of the others; inputs
    with a gradient whole."""
    parts = unsharding([p for p in parameters if isinstance(p, DTensor)])
    pairs = zip(*parts)
    found = []
    for p in parameters:
        if isinstance(p, DTensor):
            found.append(next(pairs))
            continue
        own = p.full_tensor() if isinstance(p, LazyGather) else p
        if isinstance(p, nn.Parameter):
            own = own.to(unsharding.use.compute_dtype(p.dtype))
        found.append((own.detach().requires_grad_(p.requires_grad), p))
    return StageParameters([value for value, _ in found], [handle for _, handle in found])


def _call(
    rank: RankPipeline,
    channel: GroupChannel,
    parameters: StageParameters,
    values: Sequence[Any],
    together: Axis | None,
    backwards: Callable[[], contextlib.AbstractContextManager[None]],
) -> dict[int, Any]:
    own, handles = parameters
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in handles)
    if not trained or not rank.trains():
        return dict(rank.outputs(channel, own, values))
    graded = [each.position for each in rank.results if each.graded]
    with torch.no_grad():
        if rank.loss is None:
            found, backward = rank.forwards(channel, own, values)
        else:
            made, gradients, found = rank.train(channel, own, values)
    if rank.loss is None:
        asked = {i: found[i] for i in graded}
        return found | awaiting_gradients(asked, backward, backwards, handles)
    loss = step_loss(made, gradients, handles, together)
    beside = {i: beside_loss(found[i], i, handles) for i in graded if i in rank.kept}
    return {**found, **beside, rank.loss: loss}


def _others(
    program: PipelineProgram, results: Sequence[Any], made: Container[int]
) -> Callable[[Sequence[Any], Sequence[Any]], dict[int, Any]]:
    """What makes the outputs of a graph that depend on no parameter, or are one as it is read."""
    nodes = {i: n for i, n in enumerate(results) if isinstance(n, fx.Node) and i not in made}
    order = list(program.parameters)
    read = {i: order.index(n) for i, n in nodes.items() if n in program.parameters}
    shared = [i for i in nodes if i not in read]
    graph = shared_graph(program.microbatch.serial, [nodes[i] for i in shared])

    def found(values: Sequence[Any], stored: Sequence[Any]) -> dict[int, Any]:
        with torch.no_grad():
            of_graph = dict(zip(shared, graph(*values) if shared else ()))
        return of_graph | {i: stored[at] for i, at in read.items()}

    return found
