"""Which methods of a model Dynamo is handed whole, in parts, or not at all."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.runtime.compat.compiled_modules import EAGER, IN_PARTS, WHOLE, _method, way_to_run


class Parent(nn.Module):
    def sample(self, x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = self(x)
        return x


class Model(Parent):
    """Each method beside the way it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head, self.dropout = nn.Linear(2, 2), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.head(x)
        return x

    def over_layers(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = self.dropout(block(self.blocks[i](x)))
        return self(x)

    @torch.no_grad()
    def over_tokens(self, x: torch.Tensor) -> torch.Tensor:
        while len(x) < 9:
            x = self.forward(x)
        return x

    def over_a_layer(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.head(x)
        return x

    def over_a_method(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.over_layers(x)
        return x

    def by_another(self, x: torch.Tensor) -> torch.Tensor:
        return self.over_a_layer(x)

    def sample(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return super().sample(x, n)

    def trains(self, x: torch.Tensor, optimizer: Any) -> None:
        self(x).sum().backward()
        optimizer.step()

    def trains_by_another(self, x: torch.Tensor, optimizer: Any) -> None:
        self.trains(x, optimizer)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def own_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)

    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self(x)

    def blocks_of(self) -> torch.Tensor:
        return self(torch.ones(1, 2))

    def recursive(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.recursive(self(x), n - 1) if n else x


@pytest.mark.parametrize(
    ("name", "way", "left"),
    [
        ("over_layers", WHOLE, ()),
        ("over_tokens", IN_PARTS, ("over_tokens",)),
        ("over_a_layer", IN_PARTS, ("over_a_layer",)),
        ("over_a_method", IN_PARTS, ("over_a_method",)),
        ("by_another", IN_PARTS, ("over_a_layer", "by_another")),
        ("sample", IN_PARTS, ("sample", "sample")),
        ("trains", EAGER, ()),
        ("trains_by_another", EAGER, ()),
        ("own_step", WHOLE, ()),
        ("stream", EAGER, ()),
        ("recursive", WHOLE, ()),
    ],
)
def test_way_to_run(name: str, way: str, left: tuple[str, ...]) -> None:
    found, codes = way_to_run(Model(), getattr(Model, name))
    assert (found, tuple(code.co_name for code in codes)) == (way, left)


def test_what_has_no_source_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    exec("def method(self, x):\n    return self(x)", made)
    made["method"].__module__ = __name__
    for line in ("", "import run\n"):  # Python 3.13 keeps the text of `python -c` there
        if line:
            monkeypatch.setitem(linecache.cache, "<string>", (len(line), None, [line], "<string>"))
        assert way_to_run(Model(), made["method"]) == (EAGER, [])


@pytest.mark.parametrize(
    ("name", "given", "compiled"),
    [
        ("over_layers", (), ["over_layers"]),
        ("over_tokens", (), ["parts"]),
        ("sample", (2,), ["parts"]),
        ("stream", (), []),
        ("blocks_of", (), []),  # without data
    ],
)
def test_a_method_returns_what_it_returns_by_itself(
    name: str, given: tuple[int, ...], compiled: list[str]
) -> None:
    model, told, seen = Model().eval(), list[Any](), list[str]()

    def compile_(fn: Any) -> Any:
        seen.append(fn.__name__)
        return fn

    args = (torch.randn(9, 2), *given) if name != "blocks_of" else ()
    options = {"tp": 2}
    method = _method(compile_, getattr(model, name), [options], lambda *one: told.append(one))
    for _ in range(2):
        found, want = method(model, *args), getattr(Model, name)(model, *args)
        if name == "stream":
            found, want = next(found), next(want)
        assert isinstance(found, torch.Tensor) and torch.equal(found, want)
    assert [one for one in seen if one != "_call_impl"] == compiled
    assert told == ([] if compiled or name == "stream" else [([model], options)])
    assert model._compiled_call_impl is None
