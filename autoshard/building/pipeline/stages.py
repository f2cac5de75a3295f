"""Stages: the graph of one micro-batch, cut in the order of its operators.

What a stage reads of an earlier one is sent along the chain, from neighbour to neighbour; shared
values are computed where they are read, and a parameter that two stages read is lent by the first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.building.pipeline.microbatch import MicrobatchGraph
from autoshard.errors import ConfigError, PlanError, message
from autoshard.planning import TRAINED_BYTES, cost, is_view, tensor_bytes, value
from autoshard.planning.cost import Hardware, Link
from autoshard.planning.solver import Chain, StageCut, cut_stages
from autoshard.runtime.graph_meta import DIFF, REDUCED_DTYPE, STORED_DTYPE
from autoshard.runtime.parameters import ParameterPolicy

MOST_UNITS = 800
"""Operators beyond which the search leaves out the cuts that send most."""

BACKWARD = 2.0
"""Time of a backward, in forwards: each product has two of its size."""


@dataclass(kw_only=True)
class PipelineStage:
    """graph: its placeholders are the parameters, the shared values and the received values it
    reads, given by their numbers in the micro-batch's graph and in `received`; its outputs are what
    it makes of `sent`, then `results`.

    received, sent: the values that cross the cuts before and behind it, in one order. made: for
    each of `sent`, the output that it is; None: one of `received`, passed on. results: the outputs
    of the micro-batch's graph that are made here, by their position in it.
    """

    graph: fx.GraphModule
    parameters: list[int]
    shared: list[int]
    reads: list[int]
    received: list[fx.Node]
    sent: list[fx.Node]
    made: list[int | None]
    results: list[int]

    def training(self, loss: int | None) -> fx.GraphModule:
        """The graph of a call that is differentiated: of the results only the loss, given by its
        position among the micro-batch's. A gradient of the others would be computed, of zeros."""
        own = len(self.sent) - self.made.count(None)
        outputs: Any = self.graph.graph.output_node().args[0]
        wanted = [outputs[own + at] for at, i in enumerate(self.results) if i == loss]
        return _returning(self.graph, [*outputs[:own], *wanted])


@dataclass(kw_only=True)
class StagePlan:
    """stages: in order; ranks take them in turn. homes: the rank that stores each parameter of the
    micro-batch's graph. cut: the search's answer. link: between neighbours. stage_seconds: of a
    micro-batch, each."""

    stages: list[PipelineStage]
    homes: list[int]
    cut: StageCut
    link: Link
    stage_seconds: list[float]
    sent_bytes: list[int]


def plan_stages(
    microbatch: MicrobatchGraph,
    kept: Sequence[Sequence[int]],
    hardware: Hardware,
    stored: Mapping[fx.Node, int],
    budget: int | None,
    shards: int = 1,
) -> StagePlan:
    """The cheapest cut, and the graph of each stage.

    kept: by rank, the most micro-batches of which each of its stages keeps the activations. stored:
    the home of parameters that are stored already. shards: ranks among which parameters are split
    between calls. Raises ConfigError for a graph of fewer operators than stages, and PlanError
    where no cut fits the budget.
    """
    operators = [n for n in microbatch.local.graph.nodes if n.op == "call_function"]
    ends = _units(operators, _live(microbatch.local, operators))
    ranks, live = len(kept), [each for chunk in zip(*kept) for each in chunk]
    stages = len(live)
    if len(ends) - 1 < stages:
        raise ConfigError(
            message(
                f"the mesh has pp={ranks}, of {stages} stages, and the graph can be cut into "
                f"{len(ends) - 1}",
                remedy="Give pp fewer ranks.",
            )
        )
    link = hardware.links["dp_replicate"]
    known = [stored.get(node) for node in microbatch.parameters]
    allowed = [h if h is None else frozenset(range(h, stages, ranks)) for h in known]
    chain = _chain(microbatch, operators, ends, hardware, link, allowed, shards)
    found = cut_stages(chain, stages, microbatch.microbatches, budget, live)
    if found is None and chain.homes:  # another stage borrows what it reads
        chain = _chain(microbatch, operators, ends, hardware, link, [None] * len(known), shards)
        found = cut_stages(chain, stages, microbatch.microbatches, budget, live)
    if found is None:
        raise PlanError(
            message(
                f"no cut into {stages} stages of {microbatch.microbatches} micro-batches fits "
                f"memory_budget={budget}",
                remedy="Give pp more ranks, or the budget more bytes.",
            )
        )
    starts = [0, *found.cuts, len(ends) - 1]
    runs = [operators[ends[a] : ends[b]] for a, b in zip(starts, starts[1:])]
    made = _Cutting(microbatch, runs).stages()
    homes = [
        next(s for s, st in enumerate(made) if i in st.parameters) % ranks if home is None else home
        for i, home in enumerate(known)
    ]
    return StagePlan(
        stages=made,
        homes=homes,
        cut=found,
        link=link,
        stage_seconds=[sum(chain.seconds[a:b]) for a, b in zip(starts, starts[1:])],
        sent_bytes=[sum(tensor_bytes(value(n)) for n in stage.sent) for stage in made[:-1]],
    )


def _live(local: fx.GraphModule, operators: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The values that cross a cut before each operator, in the order in which they are made."""
    position = {node: i for i, node in enumerate(operators)}
    live: list[list[fx.Node]] = [[] for _ in range(len(operators) + 1)]
    for i, node in enumerate(operators):
        last = max((position[u] for u in node.users if u in position), default=i)
        for cut in range(i + 1, last + 1):
            live[cut].append(node)
    return live


def _units(operators: Sequence[fx.Node], live: Sequence[Sequence[fx.Node]]) -> list[int]:
    """The positions where a cut may be, with both ends: what crosses it are tensors."""
    free = [
        i
        for i in range(1, len(operators))
        if all(isinstance(value(node), torch.Tensor) for node in live[i])
        and operators[i].target is not operator.getitem
    ]
    if len(free) > MOST_UNITS:
        size = {i: sum(tensor_bytes(value(node)) for node in live[i]) for i in free}
        most = sorted(size.values())[MOST_UNITS // 2]
        few = [i for i in free if size[i] <= most]
        free = few[:: math.ceil(len(few) / MOST_UNITS)]  # of equal ones, from all of the graph
    return [0, *free, len(operators)]


def _chain(
    microbatch: MicrobatchGraph,
    operators: Sequence[fx.Node],
    ends: Sequence[int],
    hardware: Hardware,
    link: Link,
    known: Sequence[frozenset[int] | None],
    shards: int,
) -> Chain:
    live = _live(microbatch.local, operators)
    unit = {node: u for u, (a, b) in enumerate(zip(ends, ends[1:])) for node in operators[a:b]}
    seconds, kept = [0.0] * (len(ends) - 1), [0.0] * (len(ends) - 1)
    for node in operators:
        forward = cost.node_seconds(
            cost.node_flops(node), cost.node_bytes(node), _dtype(node), hardware
        )
        graded = bool(node.meta.get(DIFF))
        seconds[unit[node]] += forward * (1 + BACKWARD * graded)
        if graded and not is_view(node):
            kept[unit[node]] += tensor_bytes(value(node))
    sent = [0.0]
    for cut in ends[1:-1]:
        messages = [tensor_bytes(value(n)) for n in live[cut] for _ in range(_ways(n))]
        sent.append(len(messages) * link.latency + sum(messages) / link.bandwidth)
    placeholders = microbatch.local.graph.find_nodes(op="placeholder")
    stored: list[tuple[float, Sequence[int]]] = []
    homes: dict[int, frozenset[int]] = {}
    for node, home in zip(placeholders, known):
        readers = sorted(unit[user] for user in node.users if user in unit)
        stored.append((_held(node, shards), readers))
        if home is not None and readers:
            homes[readers[0]] = homes.get(readers[0], home) & home
    return Chain(
        seconds=seconds,
        sent=[*sent, 0.0],
        kept=kept,
        stored=stored,
        update=2 / hardware.memory_bandwidth,  # read and written
        homes=homes,
    )


def _held(parameter: fx.Node, shards: int) -> float:
    """Bytes of a parameter that its stage holds: what is stored; the whole in the dtype of compute,
    where that is another tensor; and, where a shard is stored, the whole gradient from the start of
    a call to its backward."""
    val = value(parameter)
    stored, summed = (val.numel() * t(parameter).itemsize for t in (stored_dtype, sum_dtype))
    held = stored * (TRAINED_BYTES if val.requires_grad else 1.0) / shards
    if shards > 1 or stored_dtype(parameter) != val.dtype:
        held += tensor_bytes(val)
    return held + summed if shards > 1 and val.requires_grad else held


def stored_dtype(parameter: fx.Node) -> torch.dtype:
    """The dtype in which a parameter is stored, whatever it is computed in."""
    found: torch.dtype = parameter.meta.get(STORED_DTYPE, value(parameter).dtype)
    return found


def sum_dtype(parameter: fx.Node) -> torch.dtype:
    """The dtype in which the gradients of micro-batches add up."""
    policy = ParameterPolicy(reduce=parameter.meta.get(REDUCED_DTYPE))
    return policy.pending_dtype(stored_dtype(parameter))


def _ways(node: fx.Node) -> int:
    """The transfers of a value that crosses a cut: its gradient comes back."""
    return 2 if node.meta.get(DIFF) else 1


def _dtype(node: fx.Node) -> torch.dtype:
    val = value(node)
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return first.dtype if isinstance(first, torch.Tensor) else torch.float32


class _Cutting:
    """The graphs of the stages, of runs of operators of the micro-batch's graph."""

    def __init__(self, microbatch: MicrobatchGraph, runs: Sequence[Sequence[fx.Node]]) -> None:
        self.runs, self.local = runs, microbatch.local
        placeholders = list(self.local.graph.find_nodes(op="placeholder"))
        count = len(microbatch.parameters)
        self.parameters = {node: i for i, node in enumerate(placeholders[:count])}
        self.shared = {node: i for i, node in enumerate(placeholders[count:])}
        self.results: list[fx.Node] = list(self.local.graph.output_node().args[0])  # type: ignore[arg-type]
        self.stage = {node: s for s, run in enumerate(runs) for node in run}

    def stages(self) -> list[PipelineStage]:
        return [self._cut(stage) for stage in range(len(self.runs))]

    def _crossing(self, stage: int) -> list[fx.Node]:
        """The values made before `stage` that it or a later one reads."""
        return [
            node
            for run in self.runs[:stage]
            for node in run
            if any(self.stage.get(user, -1) >= stage for user in node.users)
        ]

    def _cut(self, stage: int) -> PipelineStage:
        run = self.runs[stage]
        received, sent = self._crossing(stage), self._crossing(stage + 1)
        read = {node for each in run for node in each.all_input_nodes}
        used = [node for node in received if node in read]
        inputs = [n for group in (self.parameters, self.shared) for n in group if n in read]
        graph, made = fx.Graph(), {}
        for node in [*inputs, *used]:
            made[node] = graph.placeholder(node.name)
            made[node].meta = {**node.meta, "val": _received(node) if node in used else value(node)}
        for node in self.local.graph.nodes:
            if node.op == "get_attr" and node in read:
                made[node] = graph.node_copy(node)
        for node in run:
            made[node] = graph.node_copy(node, made.__getitem__)
        own = [node for node in sent if node in self.stage and self.stage[node] == stage]
        results = [i for i, node in enumerate(self.results) if self.stage.get(node) == stage]
        graph.output(tuple(made[n] for n in [*own, *(self.results[i] for i in results)]))
        return PipelineStage(
            graph=fx.GraphModule(self.local, graph),
            parameters=[self.parameters[n] for n in inputs if n in self.parameters],
            shared=[self.shared[n] for n in inputs if n in self.shared],
            reads=[received.index(node) for node in used],
            received=received,
            sent=sent,
            made=[own.index(node) if node in own else None for node in sent],
            results=results,
        )


def _received(node: fx.Node) -> torch.Tensor:
    """A fake of a value as it arrives: contiguous, a leaf of the stage's graph."""
    val = value(node)
    fake: torch.Tensor = val.detach().new_empty(val.shape)
    return fake.requires_grad_(bool(node.meta.get(DIFF)))


def _returning(gm: fx.GraphModule, wanted: list[fx.Node]) -> fx.GraphModule:
    """The same graph with other outputs, each with memory of its own."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(gm.graph, made)
    results = []
    for node in wanted:
        if is_view(node) or node.op == "placeholder":
            results.append(graph.call_function(torch.ops.aten.clone.default, (made[node],)))
            results[-1].meta = dict(node.meta)
        else:
            results.append(made[node])
    graph.output(tuple(results))
    graph.eliminate_dead_code(lambda node: node.op != "placeholder")
    return fx.GraphModule(gm, graph)


def loss_of(microbatch: MicrobatchGraph) -> int | None:
    """Which of the micro-batch's results is the loss."""
    return None if microbatch.loss is None else microbatch.positions.index(microbatch.loss)
