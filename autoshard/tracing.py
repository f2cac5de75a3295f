"""`autoshard.trace`: plan and rewrite a model for one rank of any mesh, starting no process."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from autoshard.building import batch_facts, build_program
from autoshard.building.pipeline import TracedPipeline, build_pipeline, fit_stages
from autoshard.capture import example_device, intercept
from autoshard.config import Config
from autoshard.parameters import use_by
from autoshard.planning.cost import Cluster, cluster, cluster_of
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.parameters import MICROBATCH, SINGLE, casting


def trace(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    rank: int = 0,
    dynamic: bool | None = None,
    hardware: str | Cluster | None = None,
    microbatch: str = SINGLE,
    **options: Any,
) -> Program | TracedPipeline:
    """The program that rank `rank` of `mesh` would run for `model(*args, **kwargs)`; of a mesh with
    pp the whole pipeline, with its stages.

    model: any unsharded module; on the meta device it costs no memory, whatever its size. It is
        neither changed nor run. args, kwargs: an example batch, on the model's device.
    mesh: sizes by axis name, such as {"tp": 8}. dynamic: as in torch.compile.
    hardware: the cluster to plan for: the name of a built-in one such as "h100", a cluster
        file, or a `Cluster`; None for that of the model's device. microbatch: "single", or the
        program that runs in `no_sync` ("accumulate") or after it ("flush"). options: any other
        field of `autoshard.Config`.

    Needs no process group. With pp sizes are fixed, and `dynamic` is left out. Raises what
    torch.compile(fullgraph=True) raises where the model breaks the graph, ConfigError for options
    that the mesh does not obey, and ValueError for a rank outside the mesh or an unknown
    `microbatch`.
    """
    if microbatch not in MICROBATCH:
        raise ValueError(f"microbatch={microbatch!r} is not one of {', '.join(MICROBATCH)}")
    settings = Config.from_options({"mesh": dict(mesh), **options})
    if hardware is None:
        machine = cluster_of(example_device(model, (args, kwargs)))
    else:
        machine = cluster(hardware)
    offline = offline_mesh(dict(mesh), rank)
    use = use_by(settings, offline)
    stages = offline.axis("pp").size
    if stages > 1:

        def cut(
            gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
        ) -> TracedPipeline:
            given = (stages, settings, machine, offline.axes)
            pipeline = build_pipeline(gm, example_inputs, inputs, *given)
            fit_stages(pipeline, range(stages), settings)
            return TracedPipeline(pipeline)

        with contextlib.nullcontext() if use.param is None else casting(model, use):
            return intercept(model, args, kwargs, cut, False)

    def plan(
        gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> Program:
        facts = batch_facts(inputs)
        return build_program(
            gm, example_inputs, inputs, offline, settings, machine, microbatch, facts=facts
        )

    with contextlib.nullcontext() if use.param is None else casting(model, use):
        program = intercept(model, args, kwargs, plan, dynamic)
    read = set(program.parameters.values())
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    program.absent = tuple(
        own[0] for p, own in names.items() if p.requires_grad and not read.intersection(own)
    )
    return program
