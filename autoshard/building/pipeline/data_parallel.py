"""Data-parallel ranks beside the stages of a pipeline: what they gather and reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from autoshard.building.pipeline.program import PipelineProgram
from autoshard.compiling import use_by
from autoshard.config import Config
from autoshard.planning.cost import default_bucket_bytes, fill_buckets, reference_bytes
from autoshard.runtime.agreement import CollectiveRegion
from autoshard.runtime.collectives import Axis, I, gathering_axes, home_rank, shard_dim
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import (
    ACCUMULATE,
    ParameterPolicy,
    StageUnsharding,
    deferred_at,
    stored_states,
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
    reference = max(reference_bytes(width, ranks) for width in widths)
    limit = config.bucket_bytes or default_bucket_bytes(sum(sizes), reference)
    return fill_buckets(sizes, keys, limit, before=config.bucket_bytes is None)
