"""Run the networks of a model on the CPU: what an engine would answer, before there is a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.export.errors import export_error
from autoshard.export.rank_graph import (
    configuration,
    dtype_of,
    plan_inference,
    read_weights,
    same_plan,
    tp_of,
)
from autoshard.export.to_tensorrt.build import Network
from autoshard.export.to_tensorrt.engine import builder_module, checked_network
from autoshard.export.to_tensorrt.interpreter import NetworkInterpreter
from autoshard.export.to_tensorrt.spy import Spy
from autoshard.export.weights import Memory
from autoshard.runtime import collectives
from autoshard.runtime.collectives import Axis
from autoshard.runtime.engine import Engine


def networks(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    dtype: str | torch.dtype | None = "float32",
    dynamic: Mapping[str, tuple[int, int, int]] | None = None,
    max_length: int | None = None,
    hardware: str = "h100",
    builder: Any = None,
) -> list[tuple[Network, Spy]]:
    """The networks `autoshard.export.tensorrt` would build, with their collectives checked: of all
    ranks in one process; in a running sharded job of as many ranks, of this process's rank."""
    trt, memory = builder_module(builder), Memory(model)
    plan = plan_inference(
        model,
        args,
        kwargs,
        tp=tp_of(mesh),
        dtype=dtype_of(dtype),
        dynamic=dynamic,
        max_length=max_length,
        hardware=hardware,
    )
    if memory.world > 1 and memory.world < plan.tp:
        raise export_error(f"{memory.world} processes cannot stand for {plan.tp} ranks")
    same_plan(memory, plan)
    if memory.world > 1:
        graph = plan.rank_graph(memory.rank % plan.tp)
        weights = read_weights(memory, plan, graph)
        return [checked_network(trt, graph, weights)] if memory.rank < plan.tp else []
    made = []
    for rank in range(plan.tp):
        graph = plan.rank_graph(rank)
        made.append(checked_network(trt, graph, read_weights(memory, plan, graph, rank)))
    return made


def cpu_engine(network: Network, spy: Spy, axis: Axis | None = None, group: Any = None) -> Engine:
    """The runner of one rank with the interpreter in TensorRT's place.

    axis: what the network's collectives go over, None for one rank. group: as of Engine.
    """
    config = configuration(network.lowering.graph, None)
    return Engine(config, NetworkInterpreter(network, spy, axis), "cpu", group)


def generate(
    ranks: Sequence[tuple[Network, Spy]],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """`Engine.generate` on all ranks of one process in lockstep; all must answer the same."""

    def work(axis: Axis) -> list[list[int]]:
        engine = cpu_engine(*ranks[axis.rank], axis if len(ranks) > 1 else None)
        return engine.generate(prompts, max_new_tokens, **options)

    answers = collectives.run_ranks(len(ranks), work, timeout=600)
    if any(answer != answers[0] for answer in answers):
        raise export_error(f"the ranks answer differently: {answers}")
    return answers[0]
