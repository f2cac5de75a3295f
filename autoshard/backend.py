"""The Dynamo backend: `torch.compile(model, backend="autoshard", options={...})`.

The first call of a model captures the serial graph, plans it, stores every parameter as its
shard and asks Dynamo to trace again; the second trace sees sharded parameters and is captured
as the same serial graph, planned with their storage fixed, rewritten to local shapes and
compiled. Every later trace (another shape, eval, a graph after a break) takes the second path.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard import build
from autoshard.arrival import arrival
from autoshard.config import Config
from autoshard.lower import compile_local
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree, attempt, wait_at_most
from autoshard.runtime.lazy import LazyGather, wrap_outputs
from autoshard.runtime.materialize import unwrap
from autoshard.runtime.mesh import Mesh, data_coordinate, init_mesh, start_world
from autoshard.runtime.placement import State
from autoshard.runtime.random_ops import draw_apart
from autoshard.runtime.storage import as_dtensors
from autoshard.storing import build_agreed, store

compat.allow_rnn()

_programs: list[tuple[weakref.WeakSet[nn.Parameter], Program]] = []


def programs(model: nn.Module | None = None) -> list[Program]:
    """The programs compiled in this process, oldest first; of one model, where it is given."""
    if model is None:
        return [program for _, program in _programs]
    mine = set(map(id, model.parameters()))
    return [p for owned, p in _programs if any(id(q) in mine for q in owned)]


def autoshard(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend function that the entry point names. `options`: the fields of `Config`."""
    compat.probe()
    inputs = compat.graph_inputs(gm)
    device = build.device_type(inputs)
    start_world(device)
    with attempt():
        return _compile(gm, example_inputs, inputs, device, options or {})


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    device: str,
    options: dict[str, Any],
) -> Callable[..., Any]:
    config = Config.from_options(options)
    wait_at_most(config.timeout)
    mesh = init_mesh(config.mesh, device)
    draw_apart(data_coordinate(mesh))
    if mesh.size == 1 and "rng" not in options:
        return compile_local(gm, list(example_inputs), config.inner)
    # one process that asks for `rng` by name draws what a mesh of any size draws
    program = build_agreed(gm, example_inputs, inputs, mesh, config, device)
    planned = build.unplanned_parameters(inputs, program)
    if planned and mesh.size > 1:
        raise compat.RestartTrace(keep=store(planned, mesh, config))
    return _runner(program, inputs, mesh, config)


def _runner(
    program: Program, inputs: list[compat.GraphInput], mesh: Mesh, config: Config
) -> Callable[..., Any]:
    local = program.graph_module
    fakes = compat.backend_fakes([n for n in local.graph.nodes if n.op == "placeholder"])
    modes = _modes(program)
    with modes():
        compiled = compile_local(local, fakes, config.inner, program.finish)
    agree("compiled program", "", [], program.axis)  # nobody runs before everybody can
    arrive = arrival(inputs, program.axis, config)
    sharded = [i for i, item in enumerate(inputs) if isinstance(item.real, DTensor)]
    owned = weakref.WeakSet(
        item.real for item in inputs if isinstance(item.real, nn.Parameter)
    )
    _programs.append((owned, program))
    states = local.meta["output_states"]
    extents = local.meta["output_extents"]
    present = _presenter(states, extents, mesh, config)

    @compat.not_traced
    def run(*args: Any) -> Any:
        values: list[Any] = [a.full_tensor() if isinstance(a, LazyGather) else a for a in args]
        if arrive is not None:
            arrive(values)
        with modes():
            for i, shard in zip(sharded, unwrap(*[values[i] for i in sharded])):
                values[i] = shard
            return present(compiled(*values))

    return run


def _modes(program: Program) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The modes the program's graph is compiled and run in; Dynamo guards on the caller's."""
    grad = bool(program.serial.meta.get("enable_grad"))
    if grad or compat.autocast_is_on():
        return functools.partial(compat.explicit_modes, grad)
    return contextlib.nullcontext


def _presenter(
    states: list[State], extents: list[int | None], mesh: Mesh, config: Config
) -> Callable[[Any], Any]:
    """What turns the graph's outputs into what the caller gets, by `config.outputs`."""
    if not any(state[0] == "S" for state in states):
        return lambda outputs: outputs
    axis = mesh.axis("tp")
    device_mesh = mesh.device_mesh
    if config.outputs == "dtensor" and device_mesh is not None:
        return lambda outputs: as_dtensors(outputs, states, extents, axis, device_mesh)
    return lambda outputs: wrap_outputs(outputs, states, extents, axis)
