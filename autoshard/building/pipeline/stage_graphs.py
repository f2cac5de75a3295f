"""The graphs of the stages, of runs of operators of the micro-batch's graph.

The graph of a stage that is trained adds up its gradients: one more input for each, after its own.
If its backward returned them, all of one micro-batch would be there beside their sums: a stage
would need its parameters' size once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.building.pipeline.microbatch import MicrobatchGraph
from autoshard.passes import Context, NumberDraws, Watch, run_stage
from autoshard.planning import is_view, reached, value
from autoshard.runtime.collectives import Axis
from autoshard.runtime.graph_meta import DIFF


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

    def training(self, microbatch: MicrobatchGraph) -> fx.GraphModule:
        """The graph of a call that is differentiated, with those of the results that it returns.
        One beside a loss is cut off: a gradient of it would be computed, of zeros."""
        own = len(self.sent) - self.made.count(None)
        outputs: Any = self.graph.graph.output_node().args[0]
        wanted = list(outputs[:own])
        beside = list[fx.Node]()
        for at, i in enumerate(self.results):
            if microbatch.returned(i):
                alone = microbatch.loss in (None, microbatch.positions[i])
                (wanted if alone else beside).append(outputs[own + at])
        return _returning(self.graph, wanted, beside)

    def returned(self, microbatch: MicrobatchGraph) -> list[int]:
        """The results that `training` has, in its order."""
        found = [i for i in self.results if microbatch.returned(i)]
        return sorted(found, key=lambda i: microbatch.positions[i] != microbatch.loss)


def stage_graphs(
    microbatch: MicrobatchGraph,
    runs: Sequence[Sequence[fx.Node]],
    crossing: Sequence[list[fx.Node]],
    watch: Watch,
) -> list[PipelineStage]:
    """The graphs of the stages, of runs of operators of the micro-batch's graph. crossing: the
    values that cross the cut before each, and what is behind the last."""
    local, count = microbatch.local, len(microbatch.parameters)
    placeholders: list[fx.Node] = list(local.graph.find_nodes(op="placeholder"))
    parameters = {node: i for i, node in enumerate(placeholders[:count])}
    shared = {node: i for i, node in enumerate(placeholders[count:])}
    returned: Any = local.graph.output_node().args[0]
    repeated = of_shared_values(microbatch)
    context = Context(Axis("pp", len(runs), 0, ""))

    def cut(run: Sequence[fx.Node], received: list[fx.Node], sent: list[fx.Node]) -> PipelineStage:
        here = set(run)
        needed = reached(run, lambda node: [n for n in node.all_input_nodes if n in repeated])
        run = [*(node for node in repeated if node in needed), *run]
        read = {node for each in run for node in each.all_input_nodes}
        used = [node for node in received if node in read]
        inputs = [n for group in (parameters, shared) for n in group if n in read]
        graph, made = fx.Graph(), {}
        for node in [*inputs, *used]:
            made[node] = graph.placeholder(node.name)
            made[node].meta = {**node.meta, "val": _given(node)}
        for node in local.graph.nodes:
            if node.op == "get_attr" and node in read:
                made[node] = graph.node_copy(node)
        for node in run:
            made[node] = graph.node_copy(node, made.__getitem__)
        own = [node for node in sent if node in here]
        results = [i for i, node in enumerate(returned) if node in here]
        graph.output(tuple(made[n] for n in [*own, *(returned[i] for i in results)]))
        stage = fx.GraphModule(local, graph)
        run_stage("local", [NumberDraws()], stage, context, watch)  # layers that draw are alike
        return PipelineStage(
            graph=stage,
            parameters=[parameters[n] for n in inputs if n in parameters],
            shared=[shared[n] for n in inputs if n in shared],
            reads=[received.index(node) for node in used],
            received=received,
            sent=sent,
            made=[own.index(node) if node in own else None for node in sent],
            results=results,
        )

    return list(map(cut, runs, crossing, crossing[1:]))


def of_shared_values(microbatch: MicrobatchGraph) -> dict[fx.Node, None]:
    """Operators that read shared values alone, such as a cp rank's part of them: in the order of
    the graph. Each stage that reads one runs it; they are of no stage, and never sent."""
    nodes = microbatch.local.graph.nodes
    placeholders = microbatch.local.graph.find_nodes(op="placeholder")
    given = {*placeholders[len(microbatch.parameters) :]}
    found: dict[fx.Node, None] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all(n in given or n in found for n in inputs):
            found[node] = None
    return found


def _given(node: fx.Node) -> torch.Tensor:
    """A fake of what a stage is given: contiguous, as parameters are stored, values arrive and rows
    of shared ones are handed over, and a leaf of its graph."""
    val = value(node)
    fake: torch.Tensor = val.detach().new_empty(val.shape)
    return fake.requires_grad_(bool(node.meta.get(DIFF)))


def _returning(gm: fx.GraphModule, wanted: list[fx.Node], beside: list[fx.Node]) -> fx.GraphModule:
    """The same graph with other outputs, each with memory of its own. beside: those without
    gradients, the last."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(gm.graph, made)
    results: list[fx.Node] = []
    for node in wanted:
        if is_view(node) or node.op == "placeholder" or made[node] in results:
            results.append(graph.call_function(torch.ops.aten.clone.default, (made[node],)))
            results[-1].meta = dict(node.meta)
        else:
            results.append(made[node])
    for node in beside:
        alone = graph.call_function(torch.ops.aten.detach.default, (made[node],))
        results.append(graph.call_function(torch.ops.aten.clone.default, (alone,)))
        alone.meta = {**node.meta, DIFF: False, "val": value(node).detach()}
        results[-1].meta = dict(alone.meta)
    graph.output(tuple(results))
    graph.eliminate_dead_code(lambda node: node.op != "placeholder")
    return fx.GraphModule(gm, graph)


def graded_parameters(gm: fx.GraphModule, parameters: int) -> list[int]:
    """Which of the first placeholders, as many as there are parameters, get a gradient."""
    reached = {n for n in gm.graph.output_node().all_input_nodes if n.meta.get(DIFF)}
    for node in reversed(gm.graph.nodes):
        if node in reached:
            reached.update(n for n in node.all_input_nodes if n.meta.get(DIFF) is not False)
    own = gm.graph.find_nodes(op="placeholder")[:parameters]
    return [i for i, node in enumerate(own) if node in reached and value(node).requires_grad]


def adding_up(
    gm: fx.GraphModule, graded: Sequence[int], dtypes: Sequence[torch.dtype]
) -> fx.GraphModule:
    """The graph where each parameter of `graded`, by its number, has a sum of its dtype."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    old = gm.graph.find_nodes(op="placeholder")
    for node in old:
        made[node] = graph.node_copy(node)
    sums = []
    for i in graded:
        sums.append(graph.placeholder(f"gradient_sum_{i}"))
        val = value(old[i]).detach()
        sums[-1].meta["val"] = torch.empty_like(val, dtype=dtypes[i])  # no alias of it
        sums[-1].meta[DIFF] = False
    for i, total in zip(graded, sums):
        own = graph.call_function(summed, (made[old[i]], total))
        own.meta = dict(old[i].meta)
        made[old[i]] = own
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(fx.node.map_arg(gm.graph.output_node().args[0], made.__getitem__))
    return fx.GraphModule(gm, graph)


def summed(parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The parameter; in backward its gradient is added to `total`, of its shape, and it gets none.

    Other micro-batches write to `total` between this forward and its backward: give an alias of it
    (`total.data`), which has a version counter of its own.
    """
    found: torch.Tensor = _Summed.apply(parameter, total)
    return found


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.total.add_(grad.to_dense() if grad.is_sparse else grad)
        return None, None
