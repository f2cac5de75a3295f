"""The rewritten graphs of small models, as text: tests/golden/localize, each of one page.

Numbers are held by test_verification; these show that what is emitted is what one would write by
hand, and change only when somebody means it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.compiling.rendering import render
from autoshard.passes.base import local_value
from autoshard.passes.localize import Localize
from autoshard.passes.pipeline import rank_program
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.graph_meta import CHANGE, LINE
from golden_text import golden
from models_plain import MLP

LINES = 30


class Attention(nn.Module):
    """Four heads, projections without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).view(2, 8, 4, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(2, 8, 32))


class Vocabulary(nn.Module):
    """Embedding, head and loss over 4096 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).view(-1, 4096), labels.view(-1))


class Branches(nn.Module):
    """Two column-parallel linears read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.gate, self.up = (nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Counter(nn.Module):
    """Writes a buffer in place in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16, bias=False)
        self.register_buffer("mean", torch.zeros(16))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mlp": (MLP, (torch.zeros(8, 64),)),
    "attention": (Attention, (torch.zeros(2, 8, 32),)),
    "vocabulary": (
        Vocabulary,
        (torch.zeros(2, 32, dtype=torch.long), torch.zeros(2, 32, dtype=torch.long)),
    ),
    "shared_copy": (Branches, (torch.zeros(2, 8, 32, requires_grad=True),)),
    "mutated_buffer": (Counter, (torch.zeros(8, 16),)),
    "uneven": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)), (torch.zeros(4, 6),)),
}
# So small a vocabulary would be split another way.
STORED = {"vocabulary": {"embed.weight": "S(0)", "head.weight": "S(0)"}}


def program(name: str, rank: int = 0, n: int = 2) -> Program:
    torch.manual_seed(0)
    torch.compiler.reset()
    make, args = CASES[name]
    plan = autoshard.Plan("tp", n, STORED.get(name, {}))
    return autoshard.trace(make(), args, mesh={"tp": n}, rank=rank, plan=plan)


@pytest.mark.parametrize("name", CASES)
def test_local_program(name: str) -> None:
    made = program(name)
    text = render(made.graph_module, axes=[made.axis])
    assert text.count("\n") < LINES
    golden(f"localize/{name}", text)


def test_last_rank_of_an_uneven_dim_holds_what_is_left() -> None:
    shapes = []
    for rank in (0, 1):
        made = program("uneven", rank)
        node = next(n for n in made.graph_module.graph.nodes if "weight" in n.name)
        shapes.append(tuple(node.meta["val"].shape))
    assert shapes == [(4, 6), (3, 6)]


def test_every_change_is_emitted_once() -> None:
    made = program("shared_copy")
    changes = [n.args[:3] for n in made.graph_module.graph.nodes if n.target is redistribute]
    assert changes and len(changes) == len(set(changes))


def test_nodes_carry_their_module_and_the_users_line() -> None:
    made = program("shared_copy")
    for node in made.graph_module.graph.nodes:
        if node.target is redistribute:
            custom = node.meta["custom"]
            assert "->" in custom[CHANGE]
            assert any(file in custom[LINE] for file in ("test_localize.py", "torch"))


def test_one_rank_adds_nothing() -> None:
    made = program("mlp", n=1)
    assert not [n for n in made.graph_module.graph.nodes if n.target is redistribute]
    assert render(made.graph_module) == render(made.serial)


def test_pass_does_not_touch_the_serial_graph() -> None:
    made = program("attention")
    before = render(made.serial)
    local, _ = rank_program(made.serial, (Localize(made.decisions),), made.axis)
    assert render(local) == render(made.graph_module)
    made.serial.graph.lint()
    assert render(made.serial) == before


@pytest.mark.parametrize(("rank", "rows"), [(0, 3), (1, 3), (2, 1)])
def test_local_value_follows_the_chunk_rule(rank: int, rows: int) -> None:
    val = torch.empty(7, 4, device="meta", requires_grad=True)
    local = local_value(val, "S(0)", Axis("tp", 3, rank, ""))
    assert tuple(local.shape) == (rows, 4)
    assert local.requires_grad and local.dtype == val.dtype
    assert local_value(val, "I", Axis("tp", 3, rank, "")) is val
