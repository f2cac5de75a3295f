"""`Program.explain()`, what it says is not sharded, and `strict`, which refuses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.program import Program
from autoshard.reasons import whole
from autoshard.report import folded, human, named, table
from autoshard.runtime.errors import PlanError
from golden_text import golden
from models_hf import llama
from models_plain import MLP

LIBRARY = torch.library.Library("autoshard_report", "DEF")
LIBRARY.define("swap_halves(Tensor x) -> Tensor")


def _swap(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([right, left], -1)


LIBRARY.impl("swap_halves", _swap, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "autoshard_report::swap_halves", lambda ctx, grad: _swap(grad), lib=LIBRARY
)


class Unknown(nn.Module):
    """Calls an operator that nobody wrote a rule for, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.ops.autoshard_report.swap_halves(self.body(x))
        return x


class Tiny(nn.Module):
    """A matrix smaller than the axis."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.small = MLP(), nn.Parameter(torch.ones(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.small.sum()


def program(model: nn.Module, **options: Any) -> Program:
    torch.compiler.reset()
    return autoshard.trace(model, (torch.ones(8, 64),), mesh={"tp": 4}, **options)


@pytest.fixture(scope="module")
def text() -> str:
    with torch.device("meta"):
        model = llama(num_hidden_layers=3)()
    ids = torch.zeros(4, 32, dtype=torch.long, device="meta")
    torch.compiler.reset()
    return autoshard.trace(
        model, kwargs={"input_ids": ids, "labels": ids}, mesh={"tp": 2}
    ).explain()


def test_first_line_sums_up(text: str) -> None:
    first = text.splitlines()[0]
    assert first.startswith("autoshard: tp=2, 30 parameters, ")
    assert "% of the bytes sharded" in first


def test_repeated_layers_are_one_line_with_a_count(text: str) -> None:
    (line,) = [line for line in text.splitlines() if "mlp.down_proj.weight" in line]
    name, count, shape, state, *rest = line.split()
    assert (name, count, shape, state) == (
        "model.layers.*.mlp.down_proj.weight", "3", "64x256", "S(1)"
    )
    assert line.endswith("linear runs on the shard")
    assert "model.embed_tokens.weight" in text  # what there is once has its own name


def test_counts_of_parameters_and_collectives_add_up(text: str) -> None:
    sections = text.split("\n\n")
    rows = [line.split() for line in sections[1].splitlines()[2:]]
    assert sum(int(row[1]) for row in rows) == 30
    lines = sections[2].splitlines()
    table_rows = [line for line in lines[2:] if not (line[0].isdigit() or ":" in line[:10])]
    total = int(next(line for line in lines if "collectives a step" in line).split()[0])
    assert sum(int(line.split()[2]) for line in table_rows) == total


def test_every_phase_has_its_bytes_and_seconds(text: str) -> None:
    for phase in ("forward", "backward"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{phase}: ")]
        assert "a rank sends" in line and line.endswith("ms on cpu")


def test_memory_is_told_by_kind(text: str) -> None:
    last = text.split("\n\n")[-1]
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak, in ")
    assert all(any(line.startswith(kind) for line in last.splitlines()) for kind in kinds)


def test_two_axes_golden() -> None:
    """Where each parameter is on both axes, and the table of memory."""
    torch.compiler.reset()
    mesh = {"dp_shard": 2, "tp": 2}
    made = autoshard.trace(MLP(), (torch.ones(8, 64),), mesh=mesh, bucket_bytes=1)
    sections = made.explain().split("\n\n")
    golden("explain_two_axes", "\n\n".join([sections[0], sections[1], sections[-1]]))


def test_an_operator_without_a_rule_is_told_with_the_users_line() -> None:
    made = program(Unknown())
    found = [w for w in whole(made) if w.kind == "operator"]
    assert [w.name for w in found] == ["autoshard_report.swap_halves.default"] * 2
    assert all("test_report.py:" in w.where for w in found)
    (line,) = [line for line in made.explain().splitlines() if "swap_halves" in line[:60]]
    assert " 2 " in line and "no sharding rule" in line and "test_report.py:" in line


def test_what_is_sharded_is_not_told() -> None:
    assert whole(program(MLP())) == []
    assert "not sharded" not in program(MLP()).explain()


def test_one_rank_has_nothing_to_tell() -> None:
    torch.compiler.reset()
    made = autoshard.trace(Unknown(), (torch.ones(8, 64),), mesh={"tp": 1}, strict=True)
    assert whole(made) == []
    assert "no collectives" in made.explain()


def test_strict_accepts_what_is_sharded() -> None:
    assert program(MLP(), strict=True).stored()["up.weight"] == "S(0)"


def test_strict_refuses_an_operator_without_a_rule() -> None:
    with pytest.raises(PlanError) as caught:
        program(Unknown(), strict=True)
    error = str(caught.value)
    assert "not sharded on tp=4" in error
    assert "swap_halves" in error and "test_report.py:" in error
    assert "autoshard.sharding_rule" in error and "options['strict']" in error


def test_strict_refuses_a_matrix_that_stays_whole() -> None:
    assert program(Tiny()).stored()["small"] == "R"
    with pytest.raises(PlanError) as caught:
        program(Tiny(), strict=True)
    error = str(caught.value)
    assert "strict: 1 not sharded" in error
    assert "parameter small" in error


def test_folding_hides_numbers_only() -> None:
    assert folded("model.layers.12.mlp.w1.weight") == "model.layers.*.mlp.w1.weight"
    assert named(["h.0.x"]) == "h.0.x"
    assert named(["h.0.x", "h.1.x"]) == "h.*.x"
    assert named(["head", "head"]) == "head"


def test_bytes_for_people() -> None:
    assert [human(n) for n in (0, 1023, 1536, 5 * 2**20, 3 * 2**40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3072.0 GiB"
    ]


def test_table_columns_line_up() -> None:
    lines = table(["a", "bb"], [["long", "1"], ["x", "22"]]).splitlines()
    assert lines == ["a     bb", "----  --", "long  1", "x     22"]
