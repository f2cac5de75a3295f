"""The Dynamo backend: `torch.compile(model, backend="autoshard", options={...})`.

The first call of a model captures the serial graph, plans it, stores every parameter as its
shard and asks Dynamo to trace again; the second trace sees sharded parameters and is captured
as the same serial graph, planned with their storage fixed, rewritten to local shapes and
compiled. Every later trace (another shape, eval, a graph after a break) takes the second path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard import build
from autoshard.config import Config
from autoshard.lower import compile_local
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree
from autoshard.runtime.lazy import LazyGather, wrap_outputs
from autoshard.runtime.materialize import unwrap
from autoshard.runtime.mesh import Mesh, init_mesh
from autoshard.runtime.parameters import related_parameters, shard_parameters, unstorable
from autoshard.runtime.placement import State

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
    config = Config.from_options(options or {})
    compat.probe()
    inputs = compat.graph_inputs(gm)
    mesh = init_mesh(config.mesh, build.device_type(inputs))
    axis = mesh.axis("tp")
    if axis.size == 1:
        return compile_local(gm, list(example_inputs), config.inner)
    try:
        program = build.build_program(gm, example_inputs, inputs, axis, config)
    except Exception as error:
        # the peers wait in `agree`: tell them, so that every rank ends with this error
        agree("plan", f"failed: {type(error).__name__}", [f"{type(error).__name__}: {error}"], axis)
        raise
    agree("plan", program.plan.digest(), build.plan_lines(program), axis)
    planned = build.unplanned_parameters(inputs, program)
    if planned:
        _store(planned, mesh, config)
        raise compat.RestartTrace()
    return _runner(program, inputs, mesh, config)


def _store(planned: dict[nn.Parameter, State], mesh: Mesh, config: Config) -> None:
    """Store the parameters this graph planned as planned, and the rest of their models whole.

    Optimizers and clip_grad_norm_ cannot mix DTensors with plain tensors, so parameters that this
    graph never read become DTensors too; the first graph that reads one decides where it lives.
    """
    axis = mesh.axis("tp")
    states = {parameter: {axis.name: state} for parameter, state in planned.items()}
    rest = [
        p
        for p in related_parameters(list(planned))
        if not isinstance(p, DTensor) and p not in states and unstorable(p) is None
    ]
    states.update({p: {} for p in rest})
    moved = shard_parameters(states, mesh, broadcast=config.initial_weights == "broadcast")
    for old, new in moved.items():
        build.set_planned(new, old in planned)
    for parameter in planned:
        build.set_planned(parameter, True)  # one that stays where it is stored


def _runner(
    program: Program, inputs: list[compat.GraphInput], mesh: Mesh, config: Config
) -> Callable[..., Any]:
    local = program.graph_module
    fakes = compat.backend_fakes([n for n in local.graph.nodes if n.op == "placeholder"])
    compiled = compile_local(local, fakes, config.inner)
    sharded = [i for i, item in enumerate(inputs) if isinstance(item.real, DTensor)]
    owned = weakref.WeakSet(
        item.real for item in inputs if isinstance(item.real, nn.Parameter)
    )
    _programs.append((owned, program))
    states = local.meta["output_states"]
    extents = local.meta["output_extents"]
    axis = mesh.axis("tp")
    lazy = any(state[0] == "S" for state in states)

    @compat.not_traced
    def run(*args: Any) -> Any:
        values = [a.full_tensor() if isinstance(a, LazyGather) else a for a in args]
        for i, shard in zip(sharded, unwrap(*[values[i] for i in sharded])):
            values[i] = shard
        outputs = compiled(*values)
        return wrap_outputs(outputs, states, extents, axis) if lazy else outputs

    return run


