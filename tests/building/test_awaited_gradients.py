"""Stages of a model that returns no one loss, in one process: backwards after all forwards, and
what a rank holds until the gradients of its outputs arrive.

Pipelines under loops that compute the loss outside of the compiled model, on processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.building.pipeline.program import KEPT_BYTES, PipelineProgram
from autoshard.building.pipeline.traced import TracedPipeline
from joined_batch import Sizes
from outer_losses import train
from side_by_side import TOLERANCE
from staged import Deep, Gated, cut, graph_of, peak_of, run

AWAITED = "all forwards of a step, then all backwards"


class Open(nn.Module):
    """A model without its last line, which makes a loss, with the values of its middle."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = []
        for layer in self.layers:
            x = layer(x).tanh()
            made.append(x)
        return x, made[len(made) // 2 - 1], made[0]


def open_cut(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[Any, PipelineProgram]:
    graph = graph_of(model, (x,))
    with pytest.warns(UserWarning, match=AWAITED):
        return graph, cut(graph, 2, **options)


def squares(outputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """No mean over samples, of two of three outputs, one of which the first stage may send too."""
    return outputs[0].square().sum().sqrt() + outputs[1].abs().sum() * 1e-2


@pytest.mark.parametrize(
    ("schedule", "inner"),
    [
        ("1f1b", "aot_eager"),
        ("zb1", "eager"),
        ("interleaved", "eager"),
        pytest.param("1f1b", "inductor", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_outputs_give_those_of_parameters(schedule: str, inner: str) -> None:
    model, x = Open(), torch.randn(8, 64)
    graph, program = open_cut(model, x, pipeline={"schedule": schedule})
    assert program.schedule == "gpipe" and f"gpipe and not {schedule}" in program.lines()[0]
    assert len(program.plan.stages) == (4 if schedule == "interleaved" else 2)
    found = run(program, [item.real for item in graph[2]], inner, squares)
    loss = squares(dict(enumerate(model(x))))
    loss.backward()
    torch.testing.assert_close(found["loss"], loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradients"][name], parameter.grad)


def test_the_memory_of_each_rank_is_foretold() -> None:
    x = torch.randn(512, 64)
    graph, program = open_cut(Deep(loss=False), x, pipeline={"microbatches": 4})
    foretold = TracedPipeline(program).memory()
    assert [one.live for one in foretold] == [4, 4]
    for rank in range(2):
        peak = peak_of(program, graph, x, rank)
        assert abs(peak / foretold[rank].peak - 1) < 0.05, (peak, foretold[rank])


def test_a_budget_is_for_the_activations_of_all_microbatches() -> None:
    model, x = Gated(2, loss=False), torch.randn(2048, 64)
    options: dict[str, Any] = {"pipeline": {"microbatches": 4}, "inner": "aot_eager"}
    graph, free = open_cut(model, x, **options)
    budget = int(0.8 * max(m.peak + 2 * m.parameters for m in TracedPipeline(free).memory()))
    with pytest.warns(UserWarning, match=AWAITED):
        program = cut(graph, 2, memory={"budget": budget}, **options)
    assert {0, 1} == program.recomputed.keys()  # the last keeps as many as the first
    for rank, stage in enumerate(TracedPipeline(program).memory()):
        states = 2 * stage.parameters
        assert stage.peak + states <= budget
        assert peak_of(program, graph, x, rank) + states <= 1.02 * budget


class Beside(nn.Module):
    """A loss and outputs beside it, some of which are scalars."""

    def __init__(self, scalars: int = 1) -> None:
        super().__init__()
        self.scalars, self.up, self.down = scalars, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        up = self.up(x).tanh()
        down = self.down(up)
        losses = [down.square().sum(), up.abs().sum()][: self.scalars]
        return *losses, down, down.argmax(-1)


def test_outputs_beside_a_loss_are_kept_up_to_a_limit() -> None:
    graph = graph_of(Beside(), (torch.randn(8, 64),))
    program = cut(graph, 2)
    assert (program.schedule, program.microbatch.loss) == ("1f1b", 0)
    assert program.microbatch.kept == {1, 2} and KEPT_BYTES == 2**30
    without = graph_of(Deep(), (torch.randn(8, 64),))
    held = [one.shared for one in TracedPipeline(program).memory()]
    assert held[1] - TracedPipeline(cut(without, 2)).memory()[1].shared == 8 * (64 * 4 + 8)
    few = cut(graph, 2, memory={"budget": 50 * 8 * 64 * 4})  # the logits and one class more
    assert few.microbatch.kept == {2}


def test_who_may_have_the_schedule_that_was_asked_for() -> None:
    x = torch.randn(8, 64)
    graph, program = open_cut(Beside(2), x)
    assert program.microbatch.loss is None  # how two are weighed is known at the backward
    whatever = cut(graph_of(Beside(), (x,)), 2, pipeline={"schedule": "gpipe"})
    assert whatever.microbatch.loss is None and whatever.asked == whatever.schedule == "gpipe"
    assert open_cut(Open(), x, pipeline={"schedule": "zb1"})[1].saved.pipeline.schedule == "zb1"


class Embedded(Deep):
    """Inputs that need gradients: one a sample, and one for all, which both stages read."""

    def forward(self, x: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.sin()
        for layer in self.layers:
            x = layer(x + prefix).tanh()
        return x.square().mean()


@pytest.mark.parametrize(("schedule", "inner"), [("1f1b", "aot_eager"), ("zb1", "eager")])
def test_inputs_have_gradients(schedule: str, inner: str) -> None:
    model = Embedded()
    given = [torch.randn(n, 64, requires_grad=True) for n in (8, 1)]
    graph = graph_of(model, given)
    program = cut(graph, 2, pipeline={"schedule": schedule})
    readers = [n for n in range(2) if "L.prefix" in program.stage_lines()[1 + n]]
    assert readers == [0, 1] and not {"L.x", "L.prefix"} & program.saved.pipeline.homes.keys()
    found = run(program, [item.real for item in graph[2]], inner)
    loss = model(*given)
    loss.backward()
    torch.testing.assert_close(found["loss"], loss)
    wanted = {**dict(model.named_parameters()), "L.x": given[0], "L.prefix": given[1]}
    assert found["gradients"].keys() == wanted.keys()
    for name, gradient in found["gradients"].items():
        torch.testing.assert_close(gradient, wanted[name].grad)


def check(results: list[dict[str, Any]], schedule: str) -> None:
    for result in results:
        numbers = {key: result[key] for key in ("loss", "gradient", "norm", "read", "weights")}
        assert all(number < TOLERANCE for number in numbers.values()), result
        assert all(f"and not {schedule}" in text for text in result["said"]) and result["said"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("encoder", {}),
        ("broken", {}),
        ("judged", {"inner": "aot_eager"}),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        pytest.param("vit", {"pipeline": {"schedule": "zb1"}}, marks=pytest.mark.slow),
    ],
)
def test_three_steps_are_serial_ones(gloo2: Any, name: str, options: dict[str, Any]) -> None:
    schedule = options.get("pipeline", {}).get("schedule", "1f1b")
    check(gloo2(train, name, {"pp": 2}, 2, options), schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "micro"),
    [
        ("gpt2", {"pp": 2, "tp": 2}, 2),
        ("vit", {"pp": 2, "tp": 2}, 1),
        ("encoder", {"pp": 2, "tp": 2}, 1),
        ("broken", {"pp": 2, "tp": 2}, 1),
        ("broken", {"pp": 2, "cp": 2}, 1),
        ("gpt2", {"pp": 2, "dp_shard": 2}, 2),
        ("vit", {"pp": 2, "dp_replicate": 2}, 2),
    ],
)
def test_beside_other_axes(gloo4: Any, name: str, sizes: Sizes, micro: int) -> None:
    check(gloo4(train, name, sizes, micro, {}), "1f1b")
