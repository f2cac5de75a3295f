"""The probe of torch's version, what Dynamo calls a graph's inputs, what is drawn again."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.runtime import compat
from autoshard.runtime.compat import forward_backward
from autoshard.runtime.errors import AutoshardError


def test_the_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.probe()
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(AutoshardError, match=r"torch 2\.4\.1\+cpu is too old.*2\.11"):
        compat.probe()
    monkeypatch.undo()
    monkeypatch.delattr(torch._guards, "TracingContext")
    with pytest.raises(AutoshardError, match=r"has no torch\._guards\.TracingContext"):
        compat.probe()


class Inputs(nn.Module):
    """Reads what a graph may take: parameters, buffers, attributes, arguments, what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        self.register_module("odd name", nn.Linear(4, 4, bias=False))
        self.register_buffer("scale", torch.ones(4))
        self.extra = [torch.ones(4)]

    def forward(self, x: torch.Tensor, held: dict[str, Any], **more: Any) -> torch.Tensor:
        x = self.layers[0](x) + getattr(self, "odd name")(x) + held["keys"][0]
        return x * self.scale + self.extra[0] + more["mask"]


def test_inputs_are_named_by_where_dynamo_found_them() -> None:
    found: dict[str, tuple[str, bool]] = {}

    def backend(gm: torch.fx.GraphModule, example: Any) -> Any:
        found.update({i.name: (i.key, i.of_model) for i in compat.graph_inputs(gm)})
        return gm.forward

    torch.compiler.reset()
    one = torch.ones(4)
    torch.compile(Inputs(), backend=backend)(one, {"keys": [one + 1]}, mask=one + 2)
    assert found == {
        "L.x": ("x", False),
        "layers.0.weight": ("weight", True),
        "odd name.weight": ("weight", True),
        "L.held.keys.0": ("keys", False),
        "scale": ("scale", True),
        "extra.0": ("self", True),
        "L.more.mask": ("mask", False),
    }


@pytest.mark.parametrize("frozen", ["", "weight_ih_l0 bias_hh_l1"])
def test_an_lstm_whose_input_needs_no_gradient_trains(frozen: str) -> None:
    """torch would trace oneDNN's kernel for inference, which has no backward."""
    serial = nn.LSTM(4, 3, num_layers=2, batch_first=True)
    for name in frozen.split():
        serial.get_parameter(name).requires_grad_(False)
    model, features = copy.deepcopy(serial), torch.randn(2, 3, 4)
    options = {"rng": "invariant", "inner": "aot_eager"}
    for each in (serial, torch.compile(model, backend="autoshard", options=options)):
        each(features)[0].square().sum().backward()
    for want, got in zip(serial.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad, want.grad)


def test_a_generators_state_is_kept_for_what_draws_again() -> None:
    """Not for attention without dropout, which has the tag of what draws."""

    def drawing(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = F.scaled_dot_product_attention(x, x, x)
        return (y * torch.rand_like(y).square(),)

    gm = fx.symbolic_trace(drawing)
    for node in gm.graph.nodes:
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    made = forward_backward(gm, [FakeTensorMode().from_tensor(x)], lambda *graphs: None)
    assert made.backward is not None
    for graph in (made.forward.graph, made.backward.graph):
        wrapped = [node.args for node in graph.nodes if "rng_state" in str(node.target)]
        assert ["rand_like" in str(args) for args in wrapped if len(args) > 1] == [True]
        assert any("attention_for_cpu.default" in str(node.target) for node in graph.nodes)
    torch.manual_seed(0)
    y, *kept = made.forward(x.detach())
    torch.manual_seed(1)
    (grad,) = made.backward(*kept, torch.ones_like(y))
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(drawing(x)[0].sum(), x)
    torch.testing.assert_close(grad, expected)


class Counting(nn.Module):
    """A parameter, a buffer and a plain tensor; the first argument has a name of its own."""

    def __init__(own) -> None:  # noqa: N805
        super().__init__()
        own.weight, own.plain = nn.Parameter(torch.ones(4)), torch.ones(4)
        own.register_buffer("seen", torch.ones(4))

    def forward(own, x: torch.Tensor) -> torch.Tensor:  # noqa: N805
        return x * own.weight + own.seen + own.plain


model = Counting()


def decorated() -> nn.Module:
    """Its forward is another function, as decorators of libraries make it."""

    class Decorated(Counting):
        pass

    plain = Counting.forward

    @functools.wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    Decorated.forward = wrapper  # type: ignore[method-assign]
    return Decorated()


def closure() -> Any:
    inner = Counting()
    return lambda x: inner(x)


@pytest.mark.parametrize(
    ("called", "before"),
    [
        (model, ""),
        (model.forward, ""),
        (nn.Sequential(Counting()), "0."),
        (decorated(), ""),
        (closure(), "L.inner."),
        (lambda x: model(x), "G.model."),
        (functools.partial(lambda net, x: net(x), model), "args.0."),
        ({"net": model}, "L.given.net."),
    ],
)
def test_a_models_tensors_are_no_batch(called: Any, before: str) -> None:
    """However the model came into what is compiled."""
    found: list[compat.GraphInput] = []

    def backend(gm: torch.fx.GraphModule, example: Any) -> Any:
        found.extend(compat.graph_inputs(gm))
        return gm.forward

    torch.compiler.reset()
    x = torch.ones(2, 4)
    if isinstance(called, dict):
        torch.compile(lambda given: given["net"](given["x"]), backend=backend)({**called, "x": x})
    else:
        torch.compile(called, backend=backend)(x)
    own = {item.name for item in found if item.of_model}
    assert own == {f"{before}{name}" for name in ("weight", "seen", "plain")}
    assert len(found) == 4
