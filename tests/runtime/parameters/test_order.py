"""What has an order of its own on each rank: a walk through a Python set is that of its hashes."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.runtime import compat
from autoshard.verification.comparison import furthest


class Heads(nn.Module):
    """Modules, and buffers, in the order of a Python set: that of the process's hashes."""

    def __init__(self, names: list[str], modules: bool) -> None:
        super().__init__()
        for name in names:
            self.register_buffer(name, torch.rand(8))
        ordered = names if modules else sorted(names)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in ordered})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in "ab":
            x = self.heads[name](x * getattr(self, name)).sin()
        return x


def in_the_order_of_hashes(mesh: dict[str, int], modules: bool) -> str | float:
    """The error of a model with other orders on each rank; none: how far it is from rank 0's."""
    torch.compiler.reset()
    first, second = list("ab"), list("ba")
    torch.manual_seed(0)
    serial = Heads(first, modules)
    torch.manual_seed(0)
    model = Heads([first, second][int(os.environ["RANK"])], modules)
    options = {"mesh": mesh, "inner": "eager", "timeout": 60}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    try:
        return float((compiled(x) - serial(x)).abs().max())
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("axis", ["tp", "dp_shard", "dp_replicate"])
def test_orders_of_hashes(gloo2: Any, axis: str) -> None:
    """Buffers go by their names. Parameters do not, nor the states of their optimizers."""
    for off in gloo2(in_the_order_of_hashes, {axis: 2}, False):
        assert isinstance(off, float) and off < 1e-6, off
    for text in gloo2(in_the_order_of_hashes, {axis: 2}, True):
        assert "rank 0: _orig_mod.heads.a.weight; rank 1: _orig_mod.heads.b.weight" in text
        assert "PYTHONHASHSEED" in text


def test_a_set_of_names_is_walked_through_in_their_order() -> None:
    """Not in that of the process's hashes, which gave each rank a graph of its own."""
    places = {f"kind{i:02}": i for i in range(12)}

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds, self.others = set(places), frozenset(places)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in (*self.kinds, *self.others):
                x = x + places[name]
            return x

    read: list[list[Any]] = []

    def backend(gm: torch.fx.GraphModule, fakes: Any) -> Any:
        read.append([n.args[1] for n in gm.graph.nodes if n.op == "call_function"])
        return gm

    compat.trace_as_ours(backend)
    torch.compile(Kinds(), backend=backend)(torch.ones(2))
    assert read == [[*range(12), *range(12)]]


def stepped(mesh: dict[str, int], name: str) -> str | float:
    """The error of a step whose optimizer has the parameters in another order on each rank; none:
    how far the weights are from those of serial."""
    torch.compiler.reset()
    torch.manual_seed(0)
    serial = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2)])
    model, x = copy.deepcopy(serial), torch.ones(4, 8)
    options = {"mesh": mesh, "inner": "eager", "timeout": 60}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    order = slice(None, None, -1 if os.environ["RANK"] == "1" else 1)
    for run, trained, turn in ((serial, serial, slice(None)), (compiled, model, order)):
        optimizer = getattr(torch.optim, name)([*trained.parameters()][turn], lr=0.1)
        run(x).square().mean().backward()
        try:
            optimizer.step()
        except Exception as error:
            return str(error)
    pairs = zip(model.parameters(), serial.parameters(), strict=True)
    return furthest(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs)  # type: ignore[operator]


@pytest.mark.parametrize("axis", ["tp", "dp_shard", "dp_replicate"])
def test_an_optimizer_that_reads_wholes_has_one_order(gloo2: Any, axis: str) -> None:
    """Ranks would send each other another's rows. One that does not may have any."""
    for off in gloo2(stepped, {axis: 2}, "AdamW"):
        assert isinstance(off, float) and off < 1e-6, off
    for told in gloo2(stepped, {axis: 2}, "Adafactor"):
        if axis == "dp_replicate":
            assert isinstance(told, float) and told < 1e-6, told
        else:
            assert "rank 0: _orig_mod.0.weight; rank 1: _orig_mod.1.weight" in str(told)
