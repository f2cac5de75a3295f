"""Every rank of a rewritten model against its serial graph, in one process; and planted faults."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import fx, nn

from autoshard.passes import localize
from autoshard.planning.strategy import operands
from autoshard.program import Program
from autoshard.runtime.collectives.states import I, R, shard_dim
from autoshard.verification.program_check import Differences, join, split, verify_program
from gradient_types import check_types
from models import CASES
from models_hf import llama
from models_plain import MLP, Regression
from traced import WithLoss, programs, sharded_share

TOLERANCE = 1e-5
# What breaks the graph (a logger, a branch on data, Dynamo and the RNNs) runs in test_backend.
BREAKS = ("gpt2", "branch", "lstm", "transformer_break")
WHOLE = [name for name in CASES if name not in BREAKS]
EVEN: tuple[dict[str, Any], ...] = (
    {"mesh": {"tp": 2}},
    {"mesh": {"tp": 4}, "planner": {"sequence_parallel": False}},
)
UNEVEN: tuple[dict[str, Any], ...] = ({"mesh": {"tp": 3}},)
BY_THREE = ("llama_gqa", "llama_uneven", "mixtral", "t5", "bert", "vit", "convnet", "lora")


@pytest.mark.parametrize("name", WHOLE)
def test_all_ranks_compute_what_the_serial_graph_computes(name: str) -> None:
    options = EVEN + UNEVEN * (name in BY_THREE)
    made, values = programs(WithLoss(CASES[name]), (CASES[name].make_batch(0),), options)
    for program in made:
        report = verify_program(program, values)
        assert report.worst[1] < TOLERANCE, (name, program.axis.size, report.worst)
        assert len(report.gradients) >= sum(p.requires_grad for p in _weights(values))
        assert sharded_share(program) >= 0.9, (name, program.axis.size)
        print("spmd_types was told:", dict(check_types(program)))


def _weights(values: list[Any]) -> list[nn.Parameter]:
    return [value for value in values if isinstance(value, nn.Parameter)]


@pytest.mark.parametrize(("n", "batch"), [(2, 1), (4, 1), (2, 2), (2, 3)])
def test_a_sequence_parallel_llama_computes_what_the_serial_one_computes(
    n: int, batch: int
) -> None:
    """Shapes for which the residual stream is worth splitting: by sequence where n does not
    divide the batch, by batch where it does."""
    model = WithLoss(dataclasses.replace(CASES["llama"], build=llama(hidden_size=256)))
    ids = torch.randint(3, 256, (batch, 512 // batch // n * n))
    (program,), values = programs(
        model, ({"input_ids": ids, "labels": ids},), [{"mesh": {"tp": n}}]
    )
    scattered = [c for c in program.collectives() if c.op == "reduce_scatter"]
    assert len([c for c in scattered if c.phase == "forward"]) == 4  # two a layer
    report = verify_program(program, values)
    assert report.worst[1] < TOLERANCE, report.worst


def _mlp() -> tuple[Program, list[Any]]:
    torch.manual_seed(0)
    made, values = programs(
        Regression(MLP()), (torch.randn(8, 64), torch.randn(8, 64)), [{"mesh": {"tp": 2}}]
    )
    return made[0], values


def _fails(program: Program, values: list[Any]) -> bool:
    """A difference beyond rounding, or ranks that should agree and do not."""
    try:
        return not verify_program(program, values).worst[1] <= TOLERANCE
    except (AssertionError, RuntimeError):
        return True


def test_a_dropped_reduction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program, values = _mlp()
    assert not _fails(program, values)
    changes = _changes(program)
    assert {(have, want) for have, want in changes} >= {("P", "I")}
    honest = localize.redistribute
    for dropped in changes:

        def faulty(x: Any, have: str, want: str, *rest: Any, drop: Any = dropped) -> Any:
            return x if (have, want) == drop else honest(x, have, want, *rest)

        monkeypatch.setattr(localize, "redistribute", faulty)
        assert _fails(program, values), f"{dropped} was dropped and nobody noticed"


def _changes(program: Program) -> list[tuple[str, str]]:
    return [
        (node.args[1], node.args[2])
        for node in program.graph_module.graph.nodes
        if node.target is localize.redistribute
    ]


def test_an_input_whose_partial_gradient_is_not_summed_is_noticed() -> None:
    """R treated as I: the value is right, the gradient is one rank's part."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), MLP())
    made, values = programs(Regression(model), (torch.randn(8, 64),) * 2, [{"mesh": {"tp": 2}}])
    program = made[0]
    assert not _fails(program, values)
    for node, strategy in program.decisions.strategies.items():
        if strategy.inputs[:1] != (R,) or not operands(node)[0].meta.get("diff"):
            continue
        program.decisions.strategies[node] = strategy._replace(inputs=(I, *strategy.inputs[1:]))
        assert _fails(program, values), f"{node} takes I in place of R and nobody noticed"
        return
    raise AssertionError("the plan has no column-parallel operator to spoil")


def test_a_wrong_rule_is_noticed() -> None:
    """A row-parallel linear that says its partial result is whole."""
    program, values = _mlp()
    spoiled = 0
    for node, strategy in program.decisions.strategies.items():
        if strategy.output == "P" and node.op == "call_function":
            program.decisions.strategies[node] = strategy._replace(output=I)
            spoiled += 1
    assert spoiled
    assert _fails(program, values)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_split_and_join_are_inverse(n: int) -> None:
    whole = torch.randn(5, 7)
    for state in ("I", "P", "S(0)", "S(1)"):
        parts = split(whole, state, n)
        assert len(parts) == n
        torch.testing.assert_close(join(parts, state), whole)
        dim = shard_dim(state)
        if dim is not None:
            assert max(part.shape[dim] for part in parts) == -(-whole.shape[dim] // n)


def test_join_notices_ranks_that_disagree() -> None:
    with pytest.raises(AssertionError):
        join([torch.zeros(3), torch.ones(3)], I)


def test_the_differences_name_the_entry_that_is_furthest_off() -> None:
    found = Differences({"output 0": 1e-7}, {"weight": 2e-3, "bias": 1e-8})
    assert found.worst == ("weight", 2e-3)
    assert Differences().worst[1] == math.inf  # nothing was compared


def test_values_and_placeholders_are_paired() -> None:
    program, values = _mlp()
    nodes: list[fx.Node] = [n for n in program.serial.graph.nodes if n.op == "placeholder"]
    for node, value in zip(nodes, values, strict=True):
        assert tuple(node.meta["val"].shape) == tuple(value.shape)


class _Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (x / largest * 7).round() * largest / 7

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class Observed(nn.Module):
    """Fake quantization by a running maximum, which forward reads and then updates."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("largest", torch.ones(()))
        self.largest: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        y = _Quantised.apply(h, self.largest)
        with torch.no_grad():
            self.largest.mul_(0.9).add_(h.abs().amax(), alpha=0.1)
        return self.down(y).square().mean()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_operator_of_the_users_reads_a_buffer_that_forward_updates() -> None:
    made, values = programs(Observed(), (torch.randn(8, 8),), [{"mesh": {"tp": 2}}])
    report = verify_program(made[0], values)
    assert report.worst[1] < TOLERANCE, report.worst
