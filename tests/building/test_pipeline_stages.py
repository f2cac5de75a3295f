"""A serial graph cut into stages and micro-batches, and run by a schedule in one process: loss,
gradients, transfers and the order of actions, against the serial model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.building.pipeline import fit_stages
from autoshard.building.pipeline import stages as stages_module
from autoshard.building.pipeline.microbatch import shared_graph
from autoshard.building.pipeline.program import PipelineProgram, build_pipeline
from autoshard.building.pipeline.rank import stage_program
from autoshard.building.pipeline.traced import TracedPipeline
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.errors import CaptureError, ConfigError, PlanError
from autoshard.planning.cost.clusters import cluster
from autoshard.runtime.collectives.states import shard_dim
from autoshard.runtime.pipeline.channel import ValueMeta
from autoshard.runtime.pipeline.schedules import timeline
from autoshard.runtime.pipeline.stage import StageRun
from autoshard.verification.distance import finite, norm
from live_storages import LiveStorages
from model_case import BATCH, HIDDEN, SEQ
from models import CASES
from side_by_side import difference_by_norm
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


def run(program: PipelineProgram, inputs: Sequence[Any], inner: str) -> dict[str, Any]:
    """A step of the pipeline: its loss, gradients by name, and what its stages did and sent."""
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
    for _, rank, action in sorted(steps, key=lambda step: step[:2]):
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
    return {"loss": sum(losses), "gradients": gradients, "sent": boxes.sent}


def same_as_serial(name: str, stages: int, inner: str = "eager", **options: Any) -> Any:
    case = CASES[name]
    model, batch = with_loss(name), case.make_batch(0)
    if "labels" in batch and batch["labels"].dim() == 2:
        batch["labels"][0, : SEQ // 2] = -100  # micro-batches of unequal numbers of tokens
        batch["labels"][BATCH - 1] = -100
    graph = graph_of(model, (batch,))
    program = cut(graph, stages, **options)
    found = run(program, [item.real for item in graph[2]], inner)
    loss = model(batch)
    loss.backward()
    assert float(found["loss"].detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {named[name]: gradient for name, gradient in found["gradients"].items()}
    wanted = {p: p.grad for p in named.values() if p.grad is not None}
    floor = 1e-2 * max(norm(finite(g)) for g in wanted.values())
    assert wanted.keys() == gradients.keys()
    for key, gradient in wanted.items():
        assert difference_by_norm(gradients[key], gradient, floor) < 1e-5, tuple(key.shape)
    return program, found


@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [
        ("gpt2", 2, {"inner": "aot_eager"}),
        ("t5", 3, {}),
        ("gpt2", 2, {"pipeline": {"schedule": "zb1"}, "inner": "aot_eager"}),
        ("gpt2", 2, {"pipeline": {"schedule": "interleaved", "virtual_stages": 3}}),
        pytest.param(
            "gpt2",
            3,
            {"pipeline": {"schedule": "gpipe", "microbatches": 2}},
            marks=pytest.mark.slow,
        ),
        pytest.param("t5", 3, {"pipeline": {"schedule": "zb1"}}, marks=pytest.mark.slow),
        pytest.param("llama", 2, {"pipeline": {"schedule": "zb1"}}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"pipeline": {"schedule": "interleaved"}}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {}, marks=pytest.mark.slow),
        pytest.param("vit", 2, {"pipeline": {"microbatches": 4}}, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_serial_one(name: str, stages: int, options: dict[str, Any]) -> None:
    program, _ = same_as_serial(name, stages, **options)
    assert program.microbatch.microbatches == options.get("pipeline", {}).get("microbatches", BATCH)


def test_a_cut_between_layers_sends_the_hidden_states_and_nothing_else() -> None:
    program, found = same_as_serial("llama", 2)
    rows = BATCH // program.microbatch.microbatches
    hidden = rows * SEQ * HIDDEN * 4
    assert found["sent"] == {
        (0, 1): [hidden] * program.microbatch.microbatches,
        (1, 0): [hidden] * program.microbatch.microbatches,
    }


def test_what_each_stage_reads_is_said_and_tied_weights_are_read_by_two() -> None:
    graph = graph_of(with_loss("gpt2"), (CASES["gpt2"].make_batch(0),))
    program = cut(graph, 2)
    first, second = (set(stage.parameters) for stage in program.plan.stages)
    tied = [program.parameters[program.microbatch.parameters[i]] for i in first & second]
    assert [name.rsplit(".", 2)[1] for name in tied] == ["wte"]
    lines = "\n".join(program.lines())
    assert "schedule 1f1b, 4 micro-batches on 2 stages" in lines and "lm_head" not in lines


class Coupled(nn.Module):
    """Each sample less the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(up - up.mean(0)).sum()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.drop(self.up(x)))).square().sum()


def test_what_mixes_samples_is_named_with_its_line() -> None:
    graph = graph_of(Coupled(), (torch.randn(4, 8),))
    with pytest.raises(CaptureError, match=r"aten\.sub.*test_pipeline_stages\.py:\d+"):
        cut(graph, 2)
    assert cut(graph_of(Coupled(), (torch.randn(4, 8),)), 2, pipeline={"microbatches": 1})


def test_microbatches_draw_what_the_batch_draws() -> None:
    model, x = Noisy(), torch.randn(6, 8)
    graph = graph_of(model, (x,))
    losses = []
    for microbatches in (1, 2, 6):
        program = cut(graph, 2, pipeline={"microbatches": microbatches})
        torch.manual_seed(7)
        losses.append(run(program, [item.real for item in graph[2]], "aot_eager"))
    first = losses[0]
    for each in losses[1:]:
        torch.testing.assert_close(each["loss"], first["loss"])
        torch.testing.assert_close(each["gradients"], first["gradients"])


def test_where_cuts_are_left_out_they_are_left_out_all_over_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages_module, "MOST_UNITS", 8)
    layers = [part for _ in range(16) for part in (nn.Linear(512, 512), nn.Tanh())]
    graph = graph_of(nn.Sequential(*layers), (torch.randn(1024, 512),))
    plan = cut(graph, 4, pipeline={"microbatches": 4}).plan
    counts = [len(stage.graph.graph.nodes) for stage in plan.stages]
    assert max(counts) < 2 * min(counts), counts


def test_a_batch_that_does_not_divide_is_refused_with_what_would() -> None:
    graph = graph_of(Noisy().eval(), (torch.randn(6, 8),))
    with pytest.raises(ConfigError, match="6 samples.*microbatches=4.*1, 2, 3, 6"):
        cut(graph, 2, pipeline={"microbatches": 4})


def test_a_budget_that_no_cut_fits_is_an_error() -> None:
    with pytest.raises(PlanError, match="memory budget of 100"):
        cut(graph_of(Noisy().eval(), (torch.randn(6, 8),)), 2, memory={"budget": 100})


class Turned(nn.Module):
    """What crosses the cut is not contiguous: attention leaves [batch, length, heads, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).unflatten(-1, (4, 8)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.down(y.transpose(1, 2).flatten(2)).square().sum()


@pytest.mark.slow
def test_a_gradient_arrives_in_the_layout_that_the_cut_backward_reads() -> None:
    model, x = Turned(), torch.randn(4, 16, 32)
    graph = graph_of(model, (x,))
    program = cut(graph, 2, pipeline={"microbatches": 2, "schedule": "zb1"})
    (sent,) = program.plan.stages[0].sent
    assert sent.meta["val"].dim() == 4
    found = run(program, [item.real for item in graph[2]], "inductor")
    model(x).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found["gradients"][name], p.grad)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zb1"])
def test_gradients_are_added_one_by_one_to_their_sums(schedule: str) -> None:
    model, x = Deep(), torch.randn(4, 64)
    weight = model.layers[0].weight.nbytes
    graph = graph_of(model, (x,))
    program = cut(graph, 2, pipeline={"schedule": schedule})
    live = LiveStorages()
    with live:
        run(program, [item.real for item in graph[2]], "aot_eager")
    live.restore()
    # a stage's aliases of its parameters, their sums, one gradient, and rows of activations
    assert 16 * weight < live.peak < 18 * weight, live.peak / weight


class Fed(Mailbox):
    """A rank alone: what it sends is gone, and what it receives is anything."""

    def __init__(self) -> None:
        super().__init__(Mailboxes(), 0)

    def send(self, to: int, values: Sequence[torch.Tensor], back: bool) -> None:
        pass

    def receive(self, source: int, metas: Sequence[ValueMeta], back: bool) -> list[torch.Tensor]:
        return [torch.randn(meta.shape, dtype=meta.dtype) for meta in metas]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1"])
def test_the_memory_of_each_rank_is_foretold(schedule: str) -> None:
    model, x = Deep(), torch.randn(512, 64)
    graph = graph_of(model, (x,))
    program = cut(graph, 2, pipeline={"schedule": schedule, "microbatches": 4})
    foretold = TracedPipeline(program).memory()
    for rank in range(2):
        peak = peak_of(program, graph, x, rank)
        assert abs(peak / foretold[rank].peak - 1) < 0.05, foretold[rank]


def peak_of(program: PipelineProgram, graph: Any, x: torch.Tensor, rank: int) -> int:
    """The most bytes that are live in a step of a rank of two, run alone."""
    stage, count = program.plan.stages[rank], program.microbatch.microbatches
    names = [program.parameters[program.microbatch.parameters[i]] for i in stage.parameters]
    own = [item.real for item in graph[2] if item.name in names]
    runner, live = stage_program(program, rank, "aot_eager"), LiveStorages()
    with live:
        rows = [[part] if rank == 0 else [] for part in x.chunk(count)]
        each = StageRun(runner, Fed(), own, rows.__getitem__, True)
        for action in program.actions(rank):
            each.run(action)
    live.restore()
    return live.peak - x.nbytes * (rank == 1)  # of the caller, and so not of the last stage


class Gated(nn.Module):
    """Layers that keep much and are computed again in little time."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(64, 128, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(128, 64, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            wide = nn.functional.gelu(up(x))
            x = x + down(wide.sigmoid() * wide).tanh()
        return x.square().sum()


@pytest.mark.parametrize(
    ("schedule", "layers", "part"),
    [("1f1b", 2, 0.8), pytest.param("zb1", 4, 0.95, marks=pytest.mark.slow)],
)
def test_each_stage_keeps_its_budget_by_recomputation_and_gradients_are_serial(
    schedule: str, layers: int, part: float
) -> None:
    model, x = Gated(layers), torch.randn(2048, 64)
    graph = graph_of(model, (x,))
    options: dict[str, Any] = {
        "pipeline": {"schedule": schedule, "microbatches": 4},
        "inner": "aot_eager",
    }
    runs = []
    free = cut(graph, 2, **options)
    held = TracedPipeline(free).memory()
    budget = int(part * max(one.peak + 2 * one.parameters for one in held))
    for program in (free, cut(graph, 2, memory={"budget": budget}, **options)):
        runs.append(run(program, [item.real for item in graph[2]], "aot_eager"))
    assert 0 in program.recomputed and not free.recomputed  # the first keeps most micro-batches
    torch.testing.assert_close(runs[1]["loss"], runs[0]["loss"])
    torch.testing.assert_close(runs[1]["gradients"], runs[0]["gradients"])
    for rank, stage in enumerate(TracedPipeline(program).memory()):
        states = 2 * stage.parameters
        assert stage.peak + states <= budget
        assert peak_of(program, graph, x, rank) + states <= 1.02 * budget
        again = program.stage_seconds(rank) - program.plan.stage_seconds[rank]
        assert (again > 0) == (rank in program.recomputed)
    with pytest.raises(PlanError, match=r"stages? \d.*on rank \d of pp.*Raise the budget to"):
        cut(graph, 2, memory={"budget": budget // 3}, **options)
