"""Layers compiled one by one, between eager code: one program, and the gradients of one device."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autoshard
from autoshard.parameters.storage import parameters_of_repeats
from autoshard.runtime.collectives.states import I, S
from autoshard.verification.comparison import furthest
from side_by_side import difference

VOCAB, WIDTH, LAYERS = 48, 32, 5


class Layer(nn.Module):
    """A norm and an MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Eager: an embedding, which the head shares, and a product that keeps its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(ids)).tanh()
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def train(sizes: dict[str, int]) -> tuple[int, int, float]:
    """Programs, parameters, and the largest difference from the serial ones after three steps."""
    model = Model().double()
    serial = copy.deepcopy(model)
    called: list[bool] = []
    model.mix.bias.register_post_accumulate_grad_hook(
        lambda p: called.append(isinstance(p.grad, DTensor))
    )
    for layer in model.layers:
        layer.compile(backend="autoshard", options={"mesh": sizes, "inner": "aot_eager"})
    every = torch.randint(VOCAB, (4, 8))
    rank = int(os.environ["RANK"])
    mine = every if "tp" in sizes else every[2 * rank : 2 * rank + 2]
    for each, ids in ((model, mine), (serial, every)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            each(ids).backward()
            optimizer.step()
    assert called == [True] * 3
    found: dict[str, Any] = dict(model.named_parameters())
    differences = [difference(found[name], p, 1.0) for name, p in serial.named_parameters()]
    return len(autoshard.programs(model)), len(found), furthest(differences)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}])
def test_layers_compiled_one_by_one(gloo2: Any, sizes: dict[str, int]) -> None:
    for programs, parameters, worst in gloo2(train, sizes):
        assert programs == 1 and parameters == 3 + 6 * LAYERS
        assert worst < 1e-12


def test_siblings_are_alike_in_class_place_and_shape() -> None:
    model = Model()
    first, second, last = model.layers[0], model.layers[1], model.layers[-1]
    last.down = nn.Linear(4 * WIDTH, WIDTH).double()
    planned = {first.up.weight: S(0), first.down.weight: S(1), first.norm.bias: I}
    found = parameters_of_repeats(planned, [model])
    assert found[second.up.weight] == S(0) and found[second.down.weight] == S(1)
    assert found[last.up.weight] == S(0) and last.down.weight not in found
    assert len(found) == 3 * (LAYERS - 1) - 1


def test_a_whole_model_has_no_siblings() -> None:
    model = Model()
    assert not parameters_of_repeats(dict.fromkeys(model.parameters(), S(0)), [model])
