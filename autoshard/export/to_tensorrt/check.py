"""Run the networks of a model on the CPU: what an engine would answer, before there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from autoshard.export.errors import export_error
from autoshard.export.rank_graph import configuration, plan_inference, read_weights
from autoshard.export.spec import EngineSpec
from autoshard.export.to_tensorrt.build import Network
from autoshard.export.to_tensorrt.engine import builder_module, checked_network
from autoshard.export.to_tensorrt.interpreter import NetworkInterpreter
from autoshard.export.to_tensorrt.spy import Spy
from autoshard.export.weight_source import WeightSource
from autoshard.runtime import collectives
from autoshard.runtime.collectives import Axis
from autoshard.runtime.engine import Engine


def networks(model: nn.Module, spec: EngineSpec, builder: Any = None) -> list[tuple[Network, Spy]]:
    """The networks that `autoshard.export.tensorrt` would build for `spec`, their collectives
    checked: of all ranks in one process; in a running sharded job of as many ranks, of this
    process's rank."""
    trt, source = builder_module(builder), WeightSource(model)
    plan, job = plan_inference(model, spec), source.job
    if 1 < job.size < plan.tp:
        raise export_error(f"{job.size} processes cannot stand for {plan.tp} ranks")
    plan.check_same(job)
    made = []
    for first in range(0, plan.tp, job.size):
        graph = plan.rank_graph((first + job.rank) % plan.tp)
        weights = read_weights(source, graph, first)
        if first + job.rank < plan.tp:
            made.append(checked_network(trt, graph, weights))
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
