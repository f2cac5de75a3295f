"""The passes before planning and those that make a planned graph one rank's, with their options;
what is refused and said where they find what they cannot do."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.building.planned import Planned
from autoshard.config import Config
from autoshard.errors import CaptureError
from autoshard.parameters import use_by
from autoshard.passes import (
    Canonicalize,
    ChunkLoss,
    DataParallel,
    ExchangeExperts,
    ExpandGroupedHeads,
    Float8Products,
    FuseInferenceLayers,
    GlobalTokenMean,
    InvariantRandom,
    Localize,
    MatchExperts,
    NumberDraws,
    Pass,
    RecoverMasks,
    ShiftLabels,
    SplitRecurrent,
    UnflattenLosses,
    UnflattenProducts,
)
from autoshard.planning import gathered_stacks, is_trained
from autoshard.runtime import compat
from autoshard.runtime.collectives import data_axes, gathering_axes
from autoshard.runtime.errors import source_line
from autoshard.runtime.graph_meta import DIFF, MUTATED, N_OUTPUTS, STORED_DTYPE
from autoshard.runtime.mesh import Mesh


def serial_passes(
    facts: Mapping[int, str] | None,
    *,
    exchanges: bool,
    sequences: bool,
    microbatches: bool = False,
    tracked: bool = False,
    float8: Float8Products | None = None,
    ranges: bool = True,
) -> list[Pass]:
    """The passes that precede planning. facts: see `RecoverMasks`, which None leaves out; ranges:
    see there too. exchanges: see `MatchExperts`. sequences, microbatches: whether an axis splits
    sequences, or the batch into those. tracked: see `InvariantRandom`. float8: that pass, where the
    options ask for it."""
    passes: list[Pass] = [Canonicalize(), ExpandGroupedHeads(), SplitRecurrent()]
    passes += [MatchExperts(exchanges), InvariantRandom(tracked)]
    if float8 is not None:
        passes.append(float8)
    if facts is not None:
        passes.append(RecoverMasks(tuple(facts.items()), ranges))
    if sequences:
        passes += [UnflattenProducts(), ShiftLabels(), UnflattenLosses()]
    elif microbatches:
        passes.append(UnflattenProducts(linear=True))
    return passes


def local_passes(
    planned: Planned,
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    dtypes: Mapping[int, torch.dtype],
    microbatch: str,
) -> list[Pass]:
    """The passes that make the planned graph one rank's, with their options."""
    passes: list[Pass] = [Localize(planned.decisions, config.recompute_collectives), NumberDraws()]
    if not is_trained(planned.serial):
        passes.append(FuseInferenceLayers())
    passes += ChunkLoss.of(planned.decisions.losses)
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


def refuse_mutated(serial: fx.GraphModule, parameters: Mapping[fx.Node, str]) -> None:
    """A parameter written in forward would be written whole into its data-parallel shard."""
    placeholders = [n for n in serial.graph.nodes if n.op == "placeholder"]
    results: Any = serial.graph.output_node().args[0]
    for i, new in zip(serial.meta.get(MUTATED, ()), results[serial.meta[N_OUTPUTS] :]):
        if placeholders[i] not in parameters:
            continue
        name, what = parameters[placeholders[i]], "writes to its parameter"
        remedy = (
            "Write to it outside the compiled call (a method: call that of the model which was "
            "given to torch.compile), or make it a buffer."
        )
        if new.target is torch.ops.aten.embedding_renorm.default:
            what = "renormalises (max_norm) the rows it looks up of"
            remedy = (
                "Make the embedding without max_norm, and bound its rows after each step: "
                "weight.data.renorm_(2, 0, max_norm)."
            )
        raise CaptureError(
            f"the model {what} {name} in forward, and data parallelism stores parameters as "
            "shards, each rank of which sees its own batch; precision, in another dtype",
            where=source_line(new.meta.get("stack_trace")),
            remedy=remedy,
        )


def warn_of_no_mean(serial: fx.GraphModule) -> None:
    """Warn of a training graph without a mean loss; one that does not train has none to weigh."""
    if any(node.meta.get(DIFF) for node in serial.graph.output_node().all_input_nodes):
        warnings.warn(
            'loss_tokens="global" found no mean loss in the graph: compute it in the '
            "compiled model, or weigh its tokens there (docs/losses.md)",
            stacklevel=2,
        )
