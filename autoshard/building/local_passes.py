"""The passes that make a planned graph one rank's, with their options."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoshard.building.mutated_parameters import refuse_mutated
from autoshard.building.planned import Planned
from autoshard.compiling import use_by
from autoshard.config import Config
from autoshard.passes import (
    ChunkLoss,
    DataParallel,
    ExchangeExperts,
    FuseInferenceLayers,
    GlobalTokenMean,
    Localize,
    Pass,
)
from autoshard.planning import gathered_stacks, is_trained
from autoshard.runtime import compat
from autoshard.runtime.collectives import data_axes, gathering_axes
from autoshard.runtime.graph_meta import STORED_DTYPE
from autoshard.runtime.mesh import Mesh


def local_passes(
    planned: Planned,
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    dtypes: Mapping[int, torch.dtype],
    microbatch: str,
) -> list[Pass]:
    """The passes that make the planned graph one rank's, with their options."""
    passes: list[Pass] = [Localize(planned.decisions, config.recompute_collectives)]
    if not is_trained(planned.serial):
        passes.append(FuseInferenceLayers())
    passes += ChunkLoss.of(planned.decisions.losses, config.chunk_loss)
    axes = gathering_axes(mesh.axes)
    if not axes and not dtypes:
        return passes
    refuse_mutated(planned.serial, planned.parameters)
    placeholders = [n for n in planned.serial.graph.nodes if n.op == "placeholder"]
    stored_dtypes = {i: inputs[i].real.dtype for i in dtypes}  # type: ignore[union-attr]
    for i, dtype in stored_dtypes.items():
        placeholders[i].meta[STORED_DTYPE] = dtype
    states = {i: planned.data[n] for i, n in enumerate(placeholders) if n in planned.data}
    weights = planned.decisions.weights
    choices = {i: weights[n] for i, n in enumerate(placeholders) if n in weights}
    if mesh.axis("ep").size > 1:
        gathered = gathered_stacks(planned.serial, planned.decisions.strategies)
        passes.append(ExchangeExperts(mesh.axis("ep"), states, mesh.outer, gathered))
    passes.append(
        DataParallel(
            axes,
            states,
            regather=config.zero == 3,
            choices=choices,
            use=use_by(config, mesh),
            dtypes=stored_dtypes,
            microbatch=microbatch,
        )
    )
    if config.loss_tokens == "global" and data_axes(mesh.axes):
        passes.append(GlobalTokenMean(data_axes(mesh.axes)))
    return passes
