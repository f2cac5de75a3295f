"""The use of stored parameters, from the options and the graph: how read, how reduced."""

from __future__ import annotations

import torch
from torch import fx, nn

from autoshard.capture import execution
from autoshard.config import Config, Precision
from autoshard.errors import ConfigError
from autoshard.runtime import compat
from autoshard.runtime.collectives import deferred_axes
from autoshard.runtime.graph_meta import REDUCED_DTYPE, STORED_DTYPE
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import (
    ACCUMULATE,
    FLUSH,
    SINGLE,
    ParameterPolicy,
    policy_of,
    unshard_parameter,
)


def use_by(config: Config, mesh: Mesh | None) -> ParameterPolicy:
    """The policy of parameters by the options, on the mesh; None: a mesh not chosen yet."""
    precision = Precision.of(config.precision)
    return ParameterPolicy(
        param=precision.param,
        reduce=precision.reduce or precision.param,
        accumulate=precision.accumulate,
        average=config.gradient_reduction == "average",
        deferred=()
        if mesh is None
        else deferred_axes(mesh.axes, config.zero, config.defer_reduction),
    )


def lowered_dtypes(inputs: list[compat.GraphInput]) -> dict[int, torch.dtype]:
    """The dtype in which the graph computes with each parameter that is stored in another."""
    found: dict[int, torch.dtype] = {}
    for i, item in enumerate(inputs):
        if isinstance(item.real, nn.Parameter) and item.real.is_floating_point():
            dtype = policy_of(item.real).param
            if dtype is not None and dtype != item.real.dtype:
                found[i] = dtype
    return found


def say_stored(gm: fx.GraphModule, inputs: list[compat.GraphInput], config: Config) -> None:
    """Write the dtypes of storage and of reduction into the meta of parameters that have others
    than those of compute."""
    reduced = use_by(config, None).reduce
    lowered = lowered_dtypes(inputs)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for i, (node, item) in enumerate(zip(placeholders, inputs, strict=True)):
        if isinstance(item.real, nn.Parameter) and item.real.is_floating_point():
            if i in lowered:
                node.meta[STORED_DTYPE] = item.real.dtype
            if reduced is not None:
                node.meta[REDUCED_DTYPE] = reduced


def traced_microbatch(gm: fx.GraphModule) -> str:
    """The microbatch, single or accumulating, that the reads of parameters in a graph are of.

    A parameter that came later than the others may still say SINGLE: nothing of it is pending.
    """
    said = {
        node.args[1]
        for node in execution(gm)
        if node.op == "call_function" and node.target is unshard_parameter and len(node.args) > 1
    }
    if ACCUMULATE in said and len(said) > 1:
        raise ConfigError(
            "one graph reads parameters of modules inside and outside of no_sync",
            remedy="Give autoshard.no_sync the whole model that is compiled.",
        )
    return next((each for each in (ACCUMULATE, FLUSH) if each in said), SINGLE)
