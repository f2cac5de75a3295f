"""What is captured of five of a graph's equal layers, grown, is the whole capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoshard.capture import capture, described, five_layers, intercept, tensors_of
from autoshard.runtime.compat import storage_key
from autoshard.runtime.graph_meta import MUTATED, N_OUTPUTS
from models_hf import DEEP, DEEP_MODELS, loss_of

SIZE = 8


class Layer(nn.Module):
    """A gated layer of a dozen operators, with what a test asks for between two of them."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor, int], Any], number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("calls", torch.zeros(SIZE))
        self.between, self.number = between, number

    def forward(self, x: torch.Tensor, front: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x + front)).sigmoid() * x.tanh() + x.exp().neg().exp()
        found = self.between(self, h, self.number)
        h = h if found is None else found
        return x + self.down(h).relu()


class Deep(nn.Module):
    """Equal layers, which read one value in front; the loss reads `also` layer's value, too."""

    def __init__(
        self,
        between: Callable[[nn.Module, torch.Tensor, int], Any] = lambda layer, h, number: None,
        around: Callable[..., torch.Tensor] = lambda layer, number, *given: layer(*given),
        also: int | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(between, i) for i in range(DEEP)])
        self.front = nn.Linear(SIZE, SIZE)
        self.around, self.also = around, also

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        front = self.front(x) * torch.tensor([1.0, 2.0] * 4)
        values = []
        for number, layer in enumerate(self.layers):
            x = self.around(layer, number, x, front)
            values.append(x)
        return (x.square() + front).mean() + (0 if self.also is None else values[self.also].sum())


def both(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, args: Any, kwargs: Any = None
) -> tuple[fx.GraphModule, fx.GraphModule, bool]:
    """The whole capture, the one of five layers, and whether that grew."""
    grew: list[bool] = []
    grown = five_layers._grown

    def noted(*given: Any) -> fx.GraphModule:
        found = grown(*given)
        grew.append(True)
        return found

    monkeypatch.setattr(five_layers, "_grown", noted)

    def captured(gm: fx.GraphModule, inputs: Any, _: Any) -> tuple[Any, Any]:
        capture(gm, inputs, whole=True)  # fakes of a second capture differ from those of a first
        return capture(gm, inputs, whole=True), capture(gm, inputs)

    whole, five = intercept(model, args, kwargs, captured)
    return whole, five, bool(grew)


def assert_equal(whole: fx.GraphModule, grown: fx.GraphModule) -> None:
    """Names, operators, arguments, metadata; which values are in one memory, and which operators
    are computed again together."""
    assert len(whole.graph.nodes) == len(grown.graph.nodes)
    assert [whole.meta[k] for k in (N_OUTPUTS, MUTATED)] == [
        grown.meta[k] for k in (N_OUTPUTS, MUTATED)
    ]
    memory: dict[int, int] = {}
    regions: dict[int, int] = {}
    for one, other in zip(whole.graph.nodes, grown.graph.nodes):
        assert str(one) == str(other) and one.op == other.op
        assert str((one.args, one.kwargs)) == str((other.args, other.kwargs)), one
        assert one.target == other.target or one.op == "get_attr", one
        assert one.meta.keys() == other.meta.keys(), one
        val = described(one.meta["val"], True)
        assert val == described(other.meta["val"], True), one
        for key in one.meta.keys() - {"val", "ac_graph_id"}:
            assert str(one.meta[key]) == str(other.meta[key]), (key, one)
        if "ac_graph_id" in one.meta:
            pair = one.meta["ac_graph_id"], other.meta["ac_graph_id"]
            assert regions.setdefault(pair[0], pair[1]) == pair[1], one
        for mine, theirs in zip(tensors_of(one), tensors_of(other), strict=True):
            assert one.op == "placeholder" or mine is not theirs
            assert mine.requires_grad == theirs.requires_grad
            assert memory.setdefault(storage_key(mine), storage_key(theirs)) == storage_key(theirs)
    assert len(set(memory.values())) == len(memory)
    assert len(set(regions.values())) == len(regions)
    assert sorted(regions) == sorted(regions, key=regions.__getitem__)


@pytest.mark.parametrize("name", DEEP_MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = DEEP_MODELS[name]
    whole, five, grew = both(monkeypatch, loss_of(model()), (), batch(0))
    assert grew
    assert_equal(whole, five)


def in_place(layer: nn.Module, h: torch.Tensor, number: int) -> None:
    h[..., :2].mul_(2)
    h.view(-1)[3:5] += 1


def without_gradients(layer: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    with torch.no_grad():
        scale = h.abs().amax(-1, keepdim=True)
    return h / scale


def detached_write(layer: nn.Module, h: torch.Tensor, number: int) -> None:
    h.data.mul_(2)


def drawn(layer: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.dropout(h, 0.5)


def in_bfloat16(layer: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer.down(h).float()


def by_checkpoint(layer: nn.Module, number: int, *given: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, *given, use_reentrant=False)


def last_by_checkpoint(layer: nn.Module, number: int, *given: torch.Tensor) -> torch.Tensor:
    return by_checkpoint(layer, number, *given) if number >= 4 else layer(*given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"between": in_place},
        {"between": without_gradients},
        {"between": detached_write},
        {"between": drawn},
        {"between": in_bfloat16},
        {"around": by_checkpoint},
        {"around": last_by_checkpoint},
        {"around": by_checkpoint, "between": in_place},
    ],
    ids=lambda options: "-".join(f.__name__ for f in options.values()),
)
def test_what_layers_do(options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, five, grew = both(monkeypatch, Deep(**options), (torch.ones(4, 6, SIZE),))
    assert grew
    assert_equal(whole, five)


def counted(layer: nn.Module, h: torch.Tensor, number: int) -> None:
    layer.calls.add_(h.detach().sum((0, 1)))


def counted_in_a_view(layer: nn.Module, h: torch.Tensor, number: int) -> None:
    layer.calls[:2].add_(h.detach().sum())


def numbered(layer: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return h * (1 + (number == 4))


def constant(layer: nn.Module, h: torch.Tensor, number: int) -> torch.Tensor:
    return h * torch.tensor([1.0, number])[0]


def by_policy(layer: nn.Module, number: int, *given: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return checkpoint(layer, *given, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize(
    "options",
    [
        {"between": counted},
        {"between": counted_in_a_view},
        {"between": numbered},
        {"between": constant},
        {"around": by_policy},
        {"also": 3},
    ],
    ids=lambda options: "-".join(getattr(f, "__name__", str(f)) for f in options.values()),
)
def test_traced_whole(options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, five, grew = both(monkeypatch, Deep(**options), (torch.ones(4, 6, SIZE),))
    assert not grew
    assert_equal(whole, five)


def test_where_layers_differ_in_what_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep()
    model.front.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    whole, five, grew = both(monkeypatch, model, (torch.ones(4, 6, SIZE),))
    assert not grew
    assert_equal(whole, five)
