"""A serial graph cut into stages and micro-batches, and run by a schedule in one process: loss,
gradients, transfers and the order of actions, against the serial model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.building.pipeline import stages as stages_module
from autoshard.building.pipeline.program import ONE_BY_ONE, PipelineProgram
from autoshard.building.pipeline.traced import TracedPipeline
from autoshard.errors import CaptureError, ConfigError, PlanError
from autoshard.verification.comparison import finite, norm
from live_storages import LiveStorages
from model_case import BATCH, HIDDEN, SEQ
from models import CASES
from side_by_side import difference_by_norm
from staged import Deep, Gated, cut, graph_of, peak_of, run, with_loss


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
        pytest.param("gpt2", 3, {"pipeline": {"microbatches": 2}}, marks=pytest.mark.slow),
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


def check_step(
    program: PipelineProgram, graph: tuple[Any, ...], model: nn.Module, *given: torch.Tensor
) -> None:
    """A step of the stages is the model's: its loss, and every gradient."""
    found = run(program, [item.real for item in graph[2]], "aot_eager")
    loss = model(*given)
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach())
    wanted = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found["gradients"], wanted)


class Masked(nn.Module):
    """A mask of positions, and numbers of them, which are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, mask: torch.Tensor, places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x) + places[:, None].sin()
        scores = (x @ x.transpose(1, 2)).masked_fill(mask, float("-inf"))
        return self.down(scores.softmax(-1) @ x).square().mean()


def test_inputs_without_the_batch_as_first_dim_are_whole() -> None:
    model, x, mask = Masked(), torch.randn(4, 6, 8), torch.ones(6, 6).triu(1).bool()
    given = mask, torch.arange(6), x
    graph = graph_of(model, given)
    program = cut(graph, 2)
    assert program.microbatch.microbatches == 4
    check_step(program, graph, model, *given)


class Alike(nn.Module):
    """Values that are alike for all samples, made for the whole batch: a class token that is
    repeated, kinds looked up by zeros, padding by new zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.kinds = nn.Parameter(torch.randn(1, 1, 8)), nn.Embedding(2, 8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        kinds = self.kinds(torch.zeros(batch, length, dtype=torch.int64))
        x = torch.cat([self.token.repeat(batch, 1, 1), self.up(x) + kinds], 1)
        padded = torch.cat([x, x.new_zeros(batch, 2, 8)], 1)
        return self.down(padded + x.new_ones(batch, 1, 8).type_as(padded)).square().mean()


def test_values_alike_for_all_samples_are_made_in_the_rows_of_each_microbatch() -> None:
    model, x = Alike(), torch.randn(4, 6, 8)
    graph = graph_of(model, (x,))
    program = cut(graph, 2)
    assert program.microbatch.microbatches == 4
    check_step(program, graph, model, x)


class Frames(nn.Module):
    """A norm over pictures whose channels come last in memory, as frames of a video."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pictures = self.up(x).permute(0, 3, 1, 2).relu().unsqueeze(0)
        video = pictures.reshape(len(x), 1, 8, 4, 4).permute(0, 2, 1, 3, 4)
        return self.down(self.norm(video).permute(0, 2, 3, 4, 1)).square().mean()


def test_a_reshape_that_does_nothing_to_one_sample_keeps_its_layout() -> None:
    """As torch traced it: the norm was traced without the copy that other strides need."""
    model, x = Frames(), torch.randn(4, 4, 4, 4)
    graph = graph_of(model, (x,))
    program = cut(graph, 2)
    assert program.microbatch.microbatches == 4
    check_step(program, graph, model, x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.drop(self.up(x)))).square().sum()


def test_what_mixes_samples_is_named_with_its_line() -> None:
    graph = graph_of(Coupled(), (torch.randn(4, 8),))
    with pytest.raises(CaptureError, match=r"aten\.sub.*test_pipeline_stages\.py:\d+"):
        cut(graph, 2, pipeline={"microbatches": 2})
    assert cut(graph_of(Coupled(), (torch.randn(4, 8),)), 2, pipeline={"microbatches": 1})


def test_a_batch_whose_samples_are_joined_is_one_microbatch() -> None:
    model, x = Coupled(), torch.randn(4, 8)
    graph = graph_of(model, (x,))
    with pytest.warns(UserWarning, match=f"{ONE_BY_ONE}.*aten.sub"):
        program = cut(graph, 2)
    assert "one micro-batch, as samples are joined, on 2 stages" in program.lines()[0]
    check_step(program, graph, model, x)


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb1"])
def test_the_last_stages_of_a_graph_of_few_operators_have_none(
    schedule: str, tmp_path: Path
) -> None:
    model, x = Few(), torch.randn(4, 8)
    graph = graph_of(model, (x,))
    program = cut(graph, 8, pipeline={"schedule": schedule})
    check_step(program, graph, model, x)
    program.saved.save(tmp_path / "plan.json")
    again = cut(graph, 8, plan=str(tmp_path / "plan.json"))
    assert again.stage_lines() == program.stage_lines()


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
    plan = cut(graph, 4, pipeline={"microbatches": 4, "schedule": "gpipe"}).plan
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


class Columns(nn.Module):
    """Two layers that both read a view of the batch, which is made of no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = x.transpose(1, 2)
        return (self.second(self.first(columns).tanh() + columns) * columns).square().sum()


def test_rows_of_a_shared_value_arrive_in_the_layout_that_stages_are_compiled_for() -> None:
    model, x = Columns(), torch.randn(4, 12, 16)
    graph = graph_of(model, (x,))
    program = cut(graph, 2, pipeline={"microbatches": 2})
    found = run(program, [item.real for item in graph[2]], "inductor")
    model(x).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found["gradients"][name], p.grad)


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


@pytest.mark.parametrize("schedule", ["1f1b", "zb1"])
def test_the_memory_of_each_rank_is_foretold(schedule: str) -> None:
    model, x = Deep(), torch.randn(512, 64)
    graph = graph_of(model, (x,))
    program = cut(graph, 2, pipeline={"schedule": schedule, "microbatches": 4})
    foretold = TracedPipeline(program).memory()
    for rank in range(2):
        peak = peak_of(program, graph, x, rank)
        assert abs(peak / foretold[rank].peak - 1) < 0.05, foretold[rank]


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
