"""The step of matrices that have owners, priced on meshes: bytes by the formula, products once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.errors import ConfigError
from autoshard.planning.cost import cluster
from autoshard.planning.estimate import Layout, Training, Weight, owned_update
from autoshard.runtime.optimizer import Work

SHAPES = [(64, 32), (32, 64)] * 2


class Net(nn.Module):
    """An embedding, matrices and their biases, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.hidden = nn.ModuleList(nn.Linear(n, m) for m, n in SHAPES)
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for up, down in zip(self.hidden[::2], self.hidden[1::2]):
            x = x + down(F.gelu(up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def price(mesh: dict[str, int], optimizer: str) -> Any:
    with torch.device("meta"):
        model, ids = Net(), torch.zeros(4, 8, dtype=torch.long)
    world = torch.Size(mesh.values()).numel()
    training = Training(optimizer)
    found = autoshard.search_meshes(model, (ids,), world=world, mesh=mesh, training=training)
    return found.rows[0]


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [({"dp_shard": 2}, 2), ({"dp_shard": 4, "tp": 2}, 8), ({"dp_replicate": 2}, 1)],
)
def test_bytes_are_those_of_the_formula_and_products_are_once(
    mesh: dict[str, int], parts: int
) -> None:
    row, plain = price(mesh, "muon"), price(mesh, "adamw")
    ranks = torch.Size(mesh.values()).numel()
    numel, copies = sum(m * n for m, n in SHAPES), ranks // parts
    # bfloat16: to the owner what it has not, and to every other rank its part
    there, back = numel * (parts - 1) // parts, numel * copies - numel // parts
    assert row.owned.sent == 2 * (there + back)
    alone = optim.Muon([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    for p in alone.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with FlopCounterMode(display=False) as counted:
        alone.step()
    assert row.owned.matrices == len(SHAPES) and row.owned.flops == counted.get_total_flops()
    # a momentum where AdamW has two moments
    assert plain.memory.optimizer - row.memory.optimizer == 4 * numel // parts
    assert row.timing.optimizer > plain.timing.optimizer and not plain.owned.matrices
    assert row.timing.optimizer > row.owned.seconds  # the other parameters


def test_experts_are_stepped_where_they_are() -> None:
    stack = {"shape": (6, 16, 8), "whole_shape": (6, 16, 8), "experts": 6, "hidden": True}
    weight = Weight(name="w", itemsize=2, trained=True, use=0, again=True, **stack)  # type: ignore[arg-type]
    training, machine = Training("muon"), cluster("h100")

    def found(layout: Layout) -> Any:
        return owned_update([weight], layout, training, machine, 1)

    on_ep = found(Layout(shard=2, experts=2))
    assert on_ep.matrices == 6 and on_ep.sent == 0
    alone = found(Layout())
    assert alone.flops == on_ep.flops and alone.seconds == pytest.approx(2 * on_ep.seconds, 1e-3)
    # beside copies each gets the other's half
    assert found(Layout(shard=2, experts=2, replicate=2)).sent == 2 * 6 * 16 * 8


@pytest.mark.parametrize("shape", [(64, 32), (1024, 1024)])  # reads for longer, and computes
def test_an_owner_computes_and_waits_for_what_it_lacks(shape: tuple[int, int]) -> None:
    training, machine = Training("muon"), cluster("h100")
    same: Any = {"itemsize": 2, "trained": True, "use": 0, "again": True, "hidden": True}
    matrix = Weight(name="w", shape=shape, whole_shape=shape, **same)
    for other, moments in (replace(matrix, trained=False), 0), (replace(matrix, hidden=False), 2):
        assert other.work(training) == Work(moments=moments)
    work, share = matrix.work(training), machine.efficiency
    computes = work.flops / (machine.device.peak(work.dtype) * share.compute)
    reads = work.nbytes / (machine.device.memory_bandwidth * share.memory)
    assert (computes > reads) == (shape[0] > 64)
    waits = (work.sent + work.returned) / (machine.link(2, 1).bandwidth * share.links)
    for shard in (1, 2):
        took = owned_update([matrix], Layout(shard=shard), training, machine, 1).seconds
        assert took == pytest.approx(max(computes, reads) + waits * (1 - 1 / shard), 1e-3)


def test_what_is_no_optimizer_says_what_is() -> None:
    with pytest.raises(ConfigError, match="no class of torch.optim"):
        Training("mu")
    with pytest.raises(ConfigError, match="No module named"):
        Training("no_such_package:SOAP")
