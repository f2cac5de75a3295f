"""`Program.explain()`, what it says is not sharded, and `strict`, which refuses it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.explain.costs import folded, named
from autoshard.explain.reasons import whole
from autoshard.explain.text_costs import clipped, human, milliseconds, page_width, table
from autoshard.program import Program
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
    return autoshard.trace(
        model, (torch.ones(8, 64),), mesh={"tp": 4}, inner="aot_eager", **options
    )


@pytest.fixture(scope="module")
def text() -> str:
    with torch.device("meta"):
        model = llama(num_hidden_layers=2)()
    ids = torch.zeros(4, 32, dtype=torch.long, device="meta")
    torch.compiler.reset()
    return autoshard.trace(model, kwargs={"input_ids": ids, "labels": ids}, mesh={"tp": 2}).explain(
        width=200
    )


def section(text: str, start: str) -> list[str]:
    """The lines of the part of a report whose first line starts so."""
    return next(part for part in text.split("\n\n") if part.lstrip().startswith(start)).splitlines()


def test_first_line_sums_up(text: str) -> None:
    first = text.splitlines()[0]
    assert first.startswith("autoshard: tp=2, 21 parameters, ")
    assert "% of the bytes sharded" in first


def test_repeated_layers_are_one_line_with_a_count(text: str) -> None:
    (line,) = [line for line in text.splitlines() if "mlp.down_proj.weight" in line]
    name, count, shape, state, *rest = line.split()
    assert (name, count, shape, state) == (
        "model.layers.0-1.mlp.down_proj.weight",
        "2",
        "64x256",
        "Shard(1)",
    )
    assert line.endswith("linear runs on the shard")
    assert "model.embed_tokens.weight" in text  # what there is once has its own name


def test_counts_of_parameters_and_collectives_add_up(text: str) -> None:
    rows = [line.split() for line in section(text, "parameter ")[2:]]
    assert sum(int(row[1]) for row in rows) == 21
    lines = section(text, "ms ")
    row = re.compile(r" *[\d.]+ +\d+% +(\d+) ")
    counts = [int(found[1]) for found in map(row.match, lines) if found]
    total = int(next(line for line in lines if "collectives a step" in line).split()[0])
    assert sum(counts) == total > 10


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
    mesh = {"dp_shard": 2, "tp": 2}
    made = autoshard.trace(MLP(), (torch.ones(8, 64),), mesh=mesh, planner={"bucket_bytes": 1})
    starts = ("autoshard:", "parameter ", "a rank holds")
    sections = [s for s in made.explain(width=150).split("\n\n") if s.startswith(starts)]
    text = re.sub(r"\bbuf\d+\b", "buf", "\n\n".join(sections))  # torch 2.14 counts otherwise
    golden("explain_two_axes", text)


def test_an_operator_without_a_rule_is_told_with_the_users_line() -> None:
    made = program(Unknown())
    found = [w for w in whole(made) if w.kind == "operator"]
    assert [w.name for w in found] == ["autoshard_report.swap_halves.default"] * 2
    assert all("test_report.py:" in w.where for w in found)
    lines = made.explain(width=300).splitlines()
    (line,) = [line for line in lines if "swap_halves" in line[:60]]
    assert " 2 " in line and "no sharding rule" in line and "test_report.py:" in line


def test_what_is_sharded_is_not_told() -> None:
    assert whole(program(MLP())) == []
    assert "not sharded" not in program(MLP()).explain()


def test_one_rank_has_nothing_to_tell() -> None:
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
    assert program(Tiny()).stored()["small"] == "I"
    with pytest.raises(PlanError) as caught:
        program(Tiny(), strict=True)
    error = str(caught.value)
    assert "strict: 1 not sharded" in error
    assert "parameter small" in error


def test_folding_hides_numbers_only() -> None:
    assert folded("model.layers.12.mlp.w1.weight") == "model.layers.*.mlp.w1.weight"
    assert named(["h.0.x"]) == "h.0.x"
    assert named(["h.0.x", "h.1.x"]) == "h.0-1.x"
    assert named(["h.0.x", "h.2.x"]) == "h.*.x"
    assert named(["head", "head"]) == "head"


def test_bytes_for_people() -> None:
    assert [human(n) for n in (0, 1023, 1536, 5 * 2**20, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]


def test_table_columns_line_up() -> None:
    lines = table(["a", "bb"], [["long", "1"], ["x", "22"]]).splitlines()
    assert lines == ["a     bb", "----  --", "long  1", "x     22"]
    assert table(["n", "b"], [["10", "x"], ["2", "y"]], right=(0,)).splitlines()[3] == " 2  y"


def test_the_last_column_wraps() -> None:
    lines = table(["a", "why"], [["x", "one two three four five six"]], width=23).splitlines()
    assert lines[2:] == ["x  one two three four", "   five six"]


def test_text_for_a_pipe_fits_a_hundred_columns() -> None:
    made = program(MLP())
    assert page_width() == 100 and page_width(70) == 70 and page_width(3) == 60
    # paths are as long as they are
    lines = [line for line in made.explain().splitlines() if "/" not in line]
    assert max(map(len, lines)) <= 100
    assert clipped("abcdefgh", 6) == "abc..." and clipped("abc", 6) == "abc"
    assert [milliseconds(s) for s in (1.2e-6, 1.234e-3, 0.5)] == ["0.001", "1.23", "500"]
