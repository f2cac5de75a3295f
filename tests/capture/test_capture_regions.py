"""Capture of gradient regions, activation checkpointing and higher-order operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from autoshard.capture.serial_graph import capture
from autoshard.errors import CaptureError
from capturing import Fn, check, region_tags, x48

# Gradient regions


def test_no_grad_region_and_detach() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        with torch.no_grad():
            a, b = y.softmax(-1).chunk(2, -1)
            scale = (a * b).sum()
            with torch.enable_grad():
                live = self.lin(y)
        return y * scale + y.detach() + live

    recorder = check(Fn(fn), [x48()])
    assert recorder.targets().count("aten.detach.default") == 2
    assert not any("set_grad" in target for target in recorder.targets())


def test_tuples_of_an_outer_value_in_a_no_grad_region() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        parts = self.lin(x).split(4, -1)
        with torch.no_grad():
            scale = parts[0].mean()
        return parts[1] * scale

    check(Fn(fn), [x48()])


def test_writes_that_autograd_does_not_see() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
            self.table = nn.Embedding(6, 8, max_norm=0.5)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.lin.weight.clamp_(-0.1, 0.1)
                self.frozen.weight.mul_(0.9).add_(self.lin.weight)
            self.lin.bias.data.mul_(0.5)
            y = self.lin(x) + self.table(ids) + self.frozen(x)
            row = y[0]
            with torch.no_grad():
                y[1] = 3
                row.mul_(2)
                y[2].copy_(x[2])
            return y * row

    check(Model(), [x48(), torch.tensor([1, 2, 2, 5])], steps=3)


def test_writes_that_autograd_sees() -> None:
    def fn(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = self.lin(x), self.lin(x).sin()
        row = a[0]
        a.copy_(y)
        b[1].copy_(y[1])
        b[2].zero_()
        with torch.no_grad():
            scale = row.sum()  # a view that is made again inside the region
        return a + b + row * scale

    check(Fn(fn), [x48(), x48()])


def test_values_are_detached_in_place() -> None:
    """And written afterwards; what has views is refused, as these keep their gradients."""

    def fn(self: Any, x: torch.Tensor, y: torch.Tensor, view: bool = False) -> torch.Tensor:
        a, b = self.lin(x), self.lin(x).sin()
        row = a[0] if view else y[0]
        torch.detach_(a)
        b.detach_().mul_(self.lin(y))
        return a * self.lin(x) + b + row

    check(Fn(fn), [x48(), x48()])
    with pytest.raises(Exception, match=r"has views is detached in place.*x.detach\(\)"):
        check(Fn(functools.partial(fn, view=True)), [x48(), x48()])


def test_detached_values_are_written() -> None:
    """What is written there has its gradient, by the name that was written alone."""

    def fn(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            a = self.lin(x).view(2, 2, 8).detach()
        a += self.lin(y).view(2, 2, 8)
        b, c = self.lin(x).detach(), self.lin(y).sin()
        b[0] = self.lin(y)[1]
        c.detach().mul_(2)  # of c autograd knows no write
        return a.view(4, 8) * b * self.lin(c) + c

    check(Fn(fn), [x48(), x48()])


def test_inference_region() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        with torch.inference_mode():
            index = y.argmax(-1)
        return y.gather(1, index[:, None].clone())

    check(Fn(fn), [x48()])


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_called_without_gradients(around: Callable[[], Any]) -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.lin(x).mean()
        return self.lin(x) * scale

    recorder = check(Fn(fn), [x48()], backward=False, around=around)
    nodes = recorder.graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.linear.default
    )
    assert all(node.meta["diff"] for node in nodes), "training is priced all the same"


def test_gradients_turned_on_inside() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = self.lin(x).mean()
        with torch.enable_grad():
            return self.lin(x) * scale

    recorder = check(Fn(fn), [x48()], around=torch.no_grad)
    assert recorder.graph.meta["enable_grad"]


# Activation checkpointing


def test_checkpoint_is_inlined_and_tagged() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda t: self.lin(t).relu(), x, use_reentrant=False)
        return x.sin()

    tags = region_tags(check(Fn(fn), [x48().requires_grad_()]))
    prefer = CheckpointPolicy.PREFER_RECOMPUTE
    first = tags[0][2]
    assert tags == [
        ("aten.linear.default", prefer, first),
        ("aten.relu.default", prefer, first),
        ("aten.linear.default", prefer, tags[2][2]),
        ("aten.relu.default", prefer, tags[2][2]),
        ("aten.sin.default", None, None),
    ]
    assert tags[2][2] > first


def test_what_is_applied_in_a_checkpointed_region_is_of_it_no_more_than_what_was_written() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y[:2]
        y.add_(1)
        return checkpoint(lambda v: v.relu(), view, use_reentrant=False)

    tags = {name: tag for name, tag, _ in region_tags(check(Fn(fn), [x48().requires_grad_()]))}
    assert tags.pop("aten.relu.default") is CheckpointPolicy.PREFER_RECOMPUTE
    assert not any(tags.values()) and "aten.slice.Tensor" in tags


def test_a_checkpointed_region_of_two_results() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = checkpoint(lambda t: (t.relu(), t.exp()), x, use_reentrant=False)
        return first - second

    tags = region_tags(check(Fn(fn), [x48().requires_grad_()]))
    assert [name for name, tag, _ in tags if tag] == ["aten.relu.default", "aten.exp.default"]


def _save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.addmm.default and not ctx.is_recompute
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(_save_matmuls)


def test_selective_checkpoint_policy() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda t: self.lin(t).relu(), x, use_reentrant=False, context_fn=_contexts
        )

    tags = region_tags(check(Fn(fn), [x48()]))
    assert [tag[1] for tag in tags] == [
        CheckpointPolicy.MUST_SAVE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    ]


# Higher-order operators


@pytest.mark.parametrize(
    ("operator", "value", "why"),
    [
        ("auto_functionalized", (torch.ones(2),), "writes into its operands"),
        ("while_loop", None, "has no flat fake value"),
        ("while_loop", {"a": torch.ones(2)}, "has no flat fake value"),
    ],
)
def test_what_cannot_be_an_opaque_node(operator: str, value: Any, why: str) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    node = graph.call_function(getattr(torch.ops.higher_order, operator), (x,))
    node.meta["example_value"] = value
    graph.output((node,))
    with pytest.raises(CaptureError, match=f"{operator} cannot be captured: it {why}"):
        capture(torch.fx.GraphModule(nn.Module(), graph), [torch.ones(2)])


class Rounded(torch.autograd.Function):
    """Straight-through rounding: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_custom_autograd_function_keeps_its_backward() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        return Rounded.apply(self.lin(x), 4.0).sum() + Rounded.apply(x, 2.0).sum()

    recorder = check(Fn(fn), [x48().requires_grad_()])
    assert recorder.targets().count("autograd_function_apply") == 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_custom_autograd_function_under_autocast() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad.float() @ w.t(), x.t() @ grad.float()

    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Product.apply(x, self.lin.weight).sin()

    recorder = check(Fn(fn), [x48()])
    assert "aten.sin.default" in recorder.targets()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_conditional() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)) * 2

    check(Fn(fn), [x48()])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_one_node() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.slope = nn.Linear(8, 24), nn.Parameter(torch.randn(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv = self.qkv(x).view(2, 16, 2, 12).transpose(1, 2)

            def score(value: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                return value + self.slope[h] * (i - j)

            return flex_attention(*qkv.chunk(3, -1), score_mod=score)

    x = torch.randn(2, 16, 8)  # its backward exists on GPUs only
    recorder = check(Model(), [x], around=torch.no_grad, backward=False)
    assert recorder.targets().count("flex_attention") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_vmap(dynamic: bool) -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.vmap(torch.vmap(lambda a, b: a * b + torch.tensor(2.0)))(self.lin(x), x)
        with torch.no_grad():
            z = torch.vmap(lambda a: a.softmax(0))(y)
        return y * z

    recorder = check(Fn(fn), [x48()], dynamic=dynamic)
    assert recorder.targets().count("aten.mul.Tensor") == 2


def test_vmap_of_what_the_graph_made() -> None:
    """As a mask is, in front of a graph break: the graph is given no tensor."""
    found = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        found.append(capture(gm, example_inputs))
        return gm.forward

    def mask() -> torch.Tensor:
        return torch.vmap(lambda i: i * 2 > i.new_ones(()))(torch.arange(4))

    assert torch.equal(torch.compile(mask, backend=backend)(), mask())
    assert torch.equal(found[0]()[0], mask())


def test_derivative_inside_the_model() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda a: self.lin(a).sin().sum())(x) * 2

    assert "aten.cos.default" in check(Fn(fn), [x48()]).targets()


def test_what_cannot_be_captured_names_the_operator_and_the_line() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).sin()

    def backend(gm: Any, example_inputs: Any) -> Any:
        node = next(n for n in gm.graph.nodes if n.target == "sin")
        node.target = "no_such_method"
        capture(gm, example_inputs)

    with pytest.raises(Exception, match="no_such_method") as caught:
        torch.compile(Fn(fn), backend=backend)(x48())
    error = caught.value.__cause__ or caught.value
    assert "test_capture_regions.py" in str(error)
    assert isinstance(error, CaptureError) or "CaptureError" in repr(caught.value)
