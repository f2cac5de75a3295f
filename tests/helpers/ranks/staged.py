"""The stages of a pipeline run by its schedule in one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.building.pipeline import fit_stages
from autoshard.building.pipeline.microbatch import shared_graph
from autoshard.building.pipeline.program import PipelineProgram, build_pipeline
from autoshard.building.pipeline.rank import stage_program
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.planning.cost.clusters import cluster
from autoshard.runtime.collectives.states import shard_dim
from autoshard.runtime.pipeline.channel import ValueMeta
from autoshard.runtime.pipeline.schedules import timeline
from autoshard.runtime.pipeline.stage import StageRun
from live_storages import LiveStorages
from models import CASES
from traced import WithLoss


class Mailboxes:
    """Channels between the stages of one process."""

    def __init__(self) -> None:
        self.boxes: defaultdict[Any, deque[torch.Tensor]] = defaultdict(deque)
        self.sent: defaultdict[Any, list[int]] = defaultdict(list)

    def of(self, stage: int) -> Mailbox:
        return Mailbox(self, stage)


class Mailbox:
    device = torch.device("cpu")

    def __init__(self, boxes: Mailboxes, stage: int) -> None:
        self.all, self.stage = boxes, stage

    def send(self, to: int, values: Sequence[torch.Tensor], back: bool) -> None:
        self.all.sent[self.stage, to].append(sum(value.nbytes for value in values))
        self.all.boxes[self.stage, to, back].extend(value.contiguous() for value in values)

    def receive(self, source: int, metas: Sequence[ValueMeta], back: bool) -> list[torch.Tensor]:
        found = [self.all.boxes[source, self.stage, back].popleft() for _ in metas]
        assert [(tuple(x.shape), x.dtype) for x in found] == [m[:2] for m in metas]
        return found

    def finish(self) -> None:
        pass


def with_loss(name: str) -> WithLoss:
    """transformers breaks the graph of a GPT-2 to warn that its config names no loss."""
    model = WithLoss(CASES[name])
    if name == "gpt2":
        model.model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


def graph_of(model: nn.Module, args: Sequence[Any]) -> tuple[Any, ...]:
    return intercept(model, args, None, lambda *graph: graph)


def cut(graph: tuple[Any, ...], stages: int, **options: Any) -> PipelineProgram:
    config = Config.from_options({"mesh": {"pp": stages}, **options})
    program = build_pipeline(*graph, stages, config, cluster("cpu"))
    fit_stages(program, range(stages), config)
    return program


def run(
    program: PipelineProgram,
    inputs: Sequence[Any],
    inner: str,
    loss: Callable[[Mapping[int, torch.Tensor]], torch.Tensor] | None = None,
) -> dict[str, Any]:
    """A step of the pipeline: its loss, gradients by name, and what its stages did and sent.

    loss: of the outputs, by their position, where the model returns none."""
    micro, plan = program.microbatch, program.plan
    place = {n: i for i, n in enumerate(micro.serial.graph.find_nodes(op="placeholder"))}
    nodes = list(dict.fromkeys(node for node, _ in micro.shared))
    whole = dict(zip(nodes, shared_graph(micro.serial, nodes)(*inputs)))
    boxes, runs = Mailboxes(), []
    for number, stage in enumerate(plan.stages):
        dims = [(whole[micro.shared[i][0]], shard_dim(micro.shared[i][1])) for i in stage.shared]

        def rows(k: int, dims: Any = dims) -> list[torch.Tensor]:
            n = micro.microbatches
            return [x if d is None else x.chunk(n, d)[k] for x, d in dims]

        own = [inputs[place[micro.parameters[i]]] for i in stage.parameters]
        compiled = stage_program(program, number, inner)
        runs.append(StageRun(compiled, boxes.of(number % program.ranks), own, rows, True))
    ranks, count, chunks = program.shape
    orders = [program.actions(rank) for rank in range(ranks)]
    unit = [1.0] * len(runs)
    spans = timeline(program.schedule, count, unit, [2.0] * len(runs), chunks)
    steps = [
        (begin, rank, action)
        for rank, order in enumerate(orders)
        for action, (begin, _) in zip(order, spans.spans[rank])
    ]
    found = None
    for _, rank, action in sorted(steps, key=lambda step: step[:2]):
        if loss is not None and found is None and action.work != "F":
            found = outer_loss(runs, count, loss)
        runs[action.chunk * ranks + rank].run(action)
    for number, each in enumerate(runs):
        own = [action for action in orders[number % ranks] if action.chunk == number // ranks]
        assert each.done == own
    assert not any(boxes.boxes.values())
    gradients: dict[str, torch.Tensor] = {}
    for stage, each in zip(plan.stages, runs):
        for i, gradient in zip(stage.parameters, each.gradients):
            name = program.parameters[micro.parameters[i]]
            if gradient is not None:
                before = gradients.get(name)
                gradients[name] = gradient if before is None else before + gradient
    losses = [r[micro.loss] for each in runs for r in each.results.values() if micro.loss in r]
    made = sum(losses) if found is None else found
    return {"loss": made, "gradients": gradients, "sent": boxes.sent}


def outer_loss(
    runs: Sequence[StageRun], count: int, loss: Callable[[Mapping[int, torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """The loss of outputs that have a row a sample, whose gradients are handed to the stages."""
    outputs = {
        position: torch.cat([each.results[k].pop(position) for k in range(count)])
        for each in runs
        for position, _ in each.program.results
    }
    for output in outputs.values():
        output.requires_grad_()
    found = loss(outputs)
    found.backward()
    for each in runs:
        for position, _ in each.program.results:
            gradient = outputs[position].grad
            if gradient is not None:
                each.arrived[position] = gradient.chunk(count)
    return found


class Deep(nn.Module):
    """Equal layers; loss: whether it returns one."""

    def __init__(self, loss: bool = True) -> None:
        super().__init__()
        self.loss = loss
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum() if self.loss else x


class Gated(nn.Module):
    """Layers that keep much and are computed again in little time."""

    def __init__(self, layers: int, loss: bool = True) -> None:
        super().__init__()
        self.loss = loss
        self.up = nn.ModuleList(nn.Linear(64, 128, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(128, 64, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            wide = nn.functional.gelu(up(x))
            x = x + down(wide.sigmoid() * wide).tanh()
        return x.square().sum() if self.loss else x


class Fed(Mailbox):
    """A rank alone: what it sends is gone, and what it receives is anything."""

    def __init__(self) -> None:
        super().__init__(Mailboxes(), 0)

    def send(self, to: int, values: Sequence[torch.Tensor], back: bool) -> None:
        pass

    def receive(self, source: int, metas: Sequence[ValueMeta], back: bool) -> list[torch.Tensor]:
        return [torch.randn(meta.shape, dtype=meta.dtype) for meta in metas]


def peak_of(program: PipelineProgram, graph: Any, x: torch.Tensor, rank: int) -> int:
    """The most bytes that are live in a step of a rank of two, run alone. Where the model returns
    no loss, each rank has the whole output, of the shape of `x`, and its gradient."""
    stage, count = program.plan.stages[rank], program.microbatch.microbatches
    names = [program.parameters[program.microbatch.parameters[i]] for i in stage.parameters]
    own = [item.real for item in graph[2] if item.name in names]
    runner, live = stage_program(program, rank, "aot_eager"), LiveStorages()
    with live:
        rows = [[part] if rank == 0 else [] for part in x.chunk(count)]
        each = StageRun(runner, Fed(), own, rows.__getitem__, True)
        late = program.microbatch.loss is None
        for action in program.actions(rank):
            if late and action.work != "F":
                late, read = False, torch.zeros_like(x)
                gradient = torch.ones_like(read)
                each.results.clear()
                each.arrived = {i: gradient.chunk(count) for i, _ in each.program.results}
            each.run(action)
    live.restore()
    return live.peak - x.nbytes * (rank == 1)  # of the caller, and so not of the last stage
