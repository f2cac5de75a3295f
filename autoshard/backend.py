"""The Dynamo backend: `torch.compile(model, backend="autoshard", options={...})`.

The first call of a model captures the serial graph, plans it, stores every parameter as its
shard, plans the graph again with their storage fixed, rewrites it to local shapes and compiles it.
Dynamo traces again in between where it may see another graph of stored parameters.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.building import (
    agree_on_unsharded,
    agreed_facts,
    batch_checker,
    build_agreed,
    holds,
    unplanned_parameters,
)
from autoshard.building.pipeline import pipelined
from autoshard.capture import device_type
from autoshard.compiling import (
    check_inductor,
    check_serving,
    compile_local,
    doing,
    made_ahead,
    options_of,
    rank_settings,
    refuse_unsharded,
    settings,
    unsharded_settings,
    watched,
)
from autoshard.config import Config, Precision, fields_of
from autoshard.errors import ConfigError
from autoshard.mesh_search import choose
from autoshard.parameters import expect_reduced, store, store_what_is_left, use_by
from autoshard.passes import PendingInput
from autoshard.planning import view_chain, views_among
from autoshard.program import Program, ProgramHandle, register
from autoshard.runtime import compat
from autoshard.runtime.agreement import (
    CollectiveRegion,
    agree,
    attempt,
    compare_every,
    wait_at_most,
)
from autoshard.runtime.collectives import State, shard_dim
from autoshard.runtime.graph_meta import (
    ENABLE_GRAD,
    FACTS,
    MUTATED,
    N_OUTPUTS,
    OUTPUT_EXTENTS,
    OUTPUT_STATES,
    PENDING_INPUTS,
    WITHHELD,
)
from autoshard.runtime.lazy_gather import LazyGather, wrap_outputs
from autoshard.runtime.mesh import Mesh, data_coordinate, init_mesh, start_world
from autoshard.runtime.parameters import (
    Arrivals,
    EagerValues,
    GradientLayouts,
    ParameterPolicy,
    as_dtensors,
    cast_parameters,
    check_copies,
    give_back,
    has_policy,
    in_one_memory,
    is_eager_value,
    keep_copies,
    on_backward_done,
    pending_of,
    policy_of,
    refuse_ddp,
    related_parameters,
    set_policy,
    unwrap,
)
from autoshard.runtime.pipeline import Withheld
from autoshard.runtime.randomness import TRACKER, draw_apart
from autoshard.training_log import training_log

BY_NAME = frozenset({"rng", "recover_masks", "memory_budget", "chunk_loss"})
"""Options for which one process builds a program too: it draws what a mesh of any size draws, its
masks are recovered, its loss is chunked, and it stays within its memory. Without them the inner
compiler gets Dynamo's graph as it is."""


def autoshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend function that the entry point names.

    options: the fields of `Config`. mode: torch.compile's own, which it takes instead of options.
    """
    inputs = compat.graph_inputs(gm)
    device = device_type(inputs)
    world = start_world(device)
    if world > 1 or _is_built_alone(options or {}):  # else the inner compiler gets the graph
        compat.specialize_floats(gm)
    region = CollectiveRegion("the compilation of a graph", ())
    with attempt(), region, doing("the first step", begins=True):
        given = options_of(options or {}, mode, device)
        run = _compile(gm, example_inputs, inputs, device, given)
        log = Config.from_options(given).log
        if log is None:
            return run
        return training_log(log).of(
            run, [i.real for i in inputs if isinstance(i.real, nn.Parameter)]
        )


def _is_built_alone(options: Mapping[str, Any]) -> bool:
    """Whether one process builds a program, too: products in float8 are a pass's."""
    precision = options.get("precision")
    in_float8 = Precision.accepts(precision) and Precision.of(precision).matmul is not None
    return in_float8 or bool(BY_NAME & fields_of(options).keys())


compat.trace_as_ours(autoshard)
compat.watch_compiles(expect_reduced, store_what_is_left)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    device: str,
    options: dict[str, Any],
) -> Callable[..., Any]:
    config = Config.from_options(options)
    wait_at_most(config.timeout)
    compare_every(config.compare_every)
    if config.mesh is None:  # a mesh is chosen for the dtypes in which it will compute
        _cast_inputs(inputs, use_by(config, None))
    choice = choose(gm, example_inputs, inputs, config, device)
    mesh = init_mesh(choice.mesh, device)
    check_inductor(config, device)
    if config.inner == "tensorrt":
        check_serving(mesh.sizes, device)
    stream = data_coordinate(mesh)
    draw_apart(stream)
    cp_rank = 0 if mesh.outer is None else mesh.outer.rank
    TRACKER.place(mesh.planned.rank, stream, cp_rank)
    _cast_inputs(inputs, use_by(config, mesh))
    config = made_ahead(inputs, mesh, config, device)
    plain = unsharded_settings(config)
    if mesh.size == 1 and not _is_built_alone(options):
        return compile_local(gm, list(example_inputs), config.inner, inductor=plain)
    if settings().unsharded:
        refuse_unsharded(mesh.sizes)
        agree_on_unsharded(inputs, mesh, config)
        return compile_local(gm, list(example_inputs), config.inner, inductor=plain)
    refuse_ddp()
    if mesh.axis("pp").size > 1:
        return _drawing(stream, pipelined(gm, example_inputs, inputs, mesh, config, device))
    facts = agreed_facts(inputs, mesh.sharing, config)
    program = build_agreed(gm, example_inputs, inputs, mesh, config, device, facts)
    planned = unplanned_parameters(inputs, program)
    if planned and mesh.size > 1:
        compat.store_in_trace(inputs, planned, lambda: store(planned, mesh, config))
        given = gm, example_inputs, inputs, mesh, config, device, facts
        program = build_agreed(*given, before=program)
    program.chosen = choice.line
    special = _runner(program, inputs, mesh, config)
    check = batch_checker(inputs, mesh.sharing, config)
    written = program.graph_module.meta.get(MUTATED, ())
    eager_values = EagerValues([item.real for item in inputs], written)
    facts = program.serial.meta.get(FACTS, {})
    if not facts:
        return _drawing(stream, _entry(special, special, facts, check, eager_values))
    # every call may have other values: both are made now, while Dynamo takes guards for them
    general = build_agreed(gm, example_inputs, inputs, mesh, config, device, {})
    general.chosen = choice.line
    other = _runner(general, inputs, mesh, config)
    return _drawing(stream, _entry(special, other, facts, check, eager_values))


def _drawing(stream: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls: `run`, drawing as this rank's place in its mesh has it. A model that was
    compiled since may have another mesh."""

    @compat.not_traced
    def draw_and_run(*args: Any) -> Any:
        draw_apart(stream)
        return run(*args)

    return draw_and_run


def _entry(
    special: Callable[[list[Any]], Any],
    general: Callable[[list[Any]], Any],
    facts: Mapping[int, str],
    check: Callable[[list[Any]], None] | None,
    eager_values: EagerValues,
) -> Callable[..., Any]:
    """The program for calls of which `facts` are true, or the one for any."""

    def run(*args: Any) -> Any:
        values = list(args)
        sources = eager_values.take(values)
        if check is not None:
            check(values)
        outputs = special(values) if holds(facts, values) else general(values)
        return eager_values.give_back(sources, outputs)

    return run


def _cast_inputs(inputs: list[compat.GraphInput], use: ParameterPolicy) -> None:
    """Read parameters of the graph in the dtype of `use`; Dynamo traces again where it did not."""
    found = [item.real for item in inputs if isinstance(item.real, nn.Parameter)]
    for parameter in found:
        has = policy_of(parameter).param
        if has_policy(parameter) and has != use.param:
            raise ConfigError(
                f"options['precision'] computes with {use.param or 'the stored dtype'}, and "
                f"the parameters are read in {has or 'the stored dtype'} since another "
                "torch.compile of this model",
                remedy="Give every torch.compile of one model the same precision.",
            )
    new = [p for p in found if not has_policy(p)]
    if use.param is None or not new:
        return
    with compat.real_tensors():
        owners = cast_parameters([p for p in related_parameters(new) if not has_policy(p)], use)
    raise compat.RestartTrace("autoshard reads parameters in another dtype", keep=owners)


def _runner(
    program: Program, inputs: list[compat.GraphInput], mesh: Mesh, config: Config
) -> Callable[[list[Any]], Any]:
    """The compiled program, as a function of the values of Dynamo's placeholders."""
    local = program.graph_module
    fakes = compat.backend_fakes([n for n in local.graph.nodes if n.op == "placeholder"])
    modes = _modes(program)
    parameters = {item.source: item.real for item in inputs if isinstance(item.real, nn.Parameter)}
    handle = ProgramHandle(program, parameters.values())
    with modes():
        compiled = compile_local(
            local,
            fakes,
            config.inner,
            handle.finish,
            program.settings(),
            rank_settings(program, inputs),
        )
    if mesh.size > 1:
        compiled = watched(compiled, mesh.axes, local)
    for axis in mesh.sharing:
        agree("compiled program", "", [], axis)  # nobody runs before everybody can
    register(handle)
    compat.lighten_guards(parameters)
    reals = [None if is_eager_value(item.real) else item.real for item in inputs]
    sharded = [i for i, real in enumerate(reals) if isinstance(real, DTensor)]
    present = _presenter(program, config)
    withhold = _withholding(program)

    written: Sequence[int] = local.meta.get(MUTATED, ())
    arrivals = Arrivals(_arriving(program, inputs), written)
    waiting: list[PendingInput] = local.meta.get(PENDING_INPUTS, [])
    known: GradientLayouts = {}
    handed = _handed_out(program, sharded)
    views = views_among(program.serial)

    def run(values: list[Any]) -> Any:
        check_copies()
        before = [values[i] for i in written] if views else ()
        taken = arrivals.take(values)
        copied = {i: (name, values[at]) for i, (name, at) in handed.items()}
        with modes():
            shards = unwrap(*[values[i] for i in sharded], known=known)
            if waiting:
                values += _take(waiting, values, shards, handle.microbatch)
            for i, shard in zip(sharded, shards):
                values[i] = shard
            outputs = compiled(*values)
            presented = withhold(give_back(taken, present(outputs)), values)
            if views:
                presented = in_one_memory(presented, views, before)
            keep_copies(presented, copied)
            return presented

    return run


def _handed_out(program: Program, stored: Sequence[int]) -> dict[int, tuple[str, int]]:
    """Outputs of the user's that are a stored parameter as it was read, or a view of it: its name
    and position."""
    serial = program.serial
    placeholders = {n: i for i, n in enumerate(serial.graph.find_nodes(op="placeholder"))}
    outputs: Any = serial.graph.output_node().args[0]
    sources = [view_chain(output)[-1] for output in outputs[: serial.meta[N_OUTPUTS]]]
    return {
        i: (program.parameters[node], placeholders[node])
        for i, node in enumerate(sources)
        if node in program.parameters and placeholders[node] in stored
    }


def _arriving(program: Program, inputs: list[compat.GraphInput]) -> dict[int, State]:
    """The states in which the graph takes what comes back from earlier ones, by position."""
    placeholders = [n for n in program.serial.graph.nodes if n.op == "placeholder"]
    return {
        i: program.decisions.state(placeholders[i])
        for i, item in enumerate(inputs)
        if isinstance(item.real, LazyGather)
    }


def _take(
    waiting: Sequence[PendingInput],
    values: Sequence[Any],
    shards: Sequence[torch.Tensor],
    what: str,
) -> list[torch.Tensor]:
    """The pending gradients a graph writes to, and their fate when its backward is done."""
    held = []
    for each in waiting:
        parameter = values[each.parameter]
        if pending_of(parameter) is None:
            set_policy([parameter], policy_of(parameter))
        pending = pending_of(parameter)
        assert pending is not None
        device = compat.local_of(parameter).device
        held.append((pending, pending.take(each.shape, each.dtype, device)))
    root = next((shard for shard in shards if shard.requires_grad), None)
    if root is not None:
        on_backward_done(root, held, what)
    # two forwards may precede one backward: the alias has a version counter of its own
    return [buffer.data for _, buffer in held]


def _modes(program: Program) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The modes the program's graph is compiled and run in; Dynamo guards on the caller's."""
    grad = bool(program.serial.meta.get(ENABLE_GRAD))
    if grad or compat.autocast_is_on():
        return functools.partial(compat.explicit_modes, grad)
    return contextlib.nullcontext


_IN_CHUNKS = (
    "it is logits, which chunk_loss=True never makes whole in training",
    "Use chunk_loss='auto' or False in options['memory'], compute what needs it in the compiled "
    "model, or call the model under torch.no_grad() to have its outputs.",
)


def _withholding(program: Program) -> Callable[[Any, Sequence[Any]], Any]:
    """What puts stand-ins among the caller's outputs, for the logits that the graph never makes
    whole. Their sizes are those that the inputs of the call have."""
    positions = program.graph_module.meta.get(WITHHELD, ())
    if not positions:
        return lambda outputs, values: outputs
    graph = program.whole.graph
    results: Any = graph.output_node().args[0]
    places = compat.symbol_places(n.meta["val"] for n in graph.find_nodes(op="placeholder"))
    kept = {i: results[i].meta["val"] for i in positions}

    def run(outputs: Any, values: Sequence[Any]) -> Any:
        made, numbers = list(outputs), {symbol: values[i] for symbol, i in places.items()}
        for i, val in kept.items():
            sizes = [compat.size_at(size, numbers) for size in val.shape]
            like = torch.empty(sizes, dtype=val.dtype, device="meta")
            made[i] = Withheld(like, i, *_IN_CHUNKS)
        return tuple(made)

    return run


def _presenter(program: Program, config: Config) -> Callable[[Any], Any]:
    """The function that makes the caller's outputs of the graph's, by `config.outputs`."""
    states, extents = map(program.graph_module.meta.__getitem__, (OUTPUT_STATES, OUTPUT_EXTENTS))
    first = program.outer
    on = [] if first is None else [(state, first.axis) for state in first.decisions.outputs]
    outer = [one if shard_dim(one[0]) is not None else None for one in on[: len(states)]]
    if not any(shard_dim(state) is not None for state in states) and not any(outer):
        return lambda outputs: outputs
    axis, device_mesh = program.axis, program.mesh.device_mesh
    if config.outputs == "dtensor" and device_mesh is not None:
        return lambda outputs: as_dtensors(outputs, states, extents, axis, device_mesh)
    return lambda outputs: wrap_outputs(outputs, states, extents, axis, outer)
