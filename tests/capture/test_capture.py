"""The captured graph, run on real inputs, gives the outputs, gradients and buffers of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.capture import interpreter
from autoshard.capture.serial_graph import capture
from autoshard.errors import CaptureError
from autoshard.planning.rules.registry import rules_for
from capturing import Fn, Recorder, check, x48

# Composite operators stay whole

Q = (2, 2, 4, 8)
COMPOSITES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "aten.linear.default": (F.linear, [(4, 8), (6, 8), (6,)]),
    "aten.matmul.default": (torch.matmul, [(2, 4, 8), (8, 6)]),
    "aten.scaled_dot_product_attention.default": (F.scaled_dot_product_attention, [Q, Q, Q]),
    "aten.layer_norm.default": (lambda x, w: F.layer_norm(x, (8,), w), [(4, 8), (8,)]),
    "aten.rms_norm.default": (lambda x, w: F.rms_norm(x, (8,), w), [(4, 8), (8,)]),
    "aten.group_norm.default": (lambda x: F.group_norm(x, 2), [(4, 8, 3)]),
    "aten.dropout.default": (lambda x: F.dropout(x, 0.5), [(4, 8)]),
    "aten.cross_entropy_loss.default": (
        lambda x: F.cross_entropy(x, torch.arange(4), label_smoothing=0.1),
        [(4, 8)],
    ),
    "aten.embedding.default": (lambda w: F.embedding(torch.arange(3), w, padding_idx=1), [(6, 8)]),
    "aten.softmax.int": (lambda x: F.softmax(x, -1), [(4, 8)]),
    "aten.log_softmax.int": (lambda x: F.log_softmax(x, -1), [(4, 8)]),
    "aten.conv1d.default": (F.conv1d, [(2, 3, 8), (4, 3, 3)]),
    "aten.conv2d.default": (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "aten.einsum.default": (lambda x, y: torch.einsum("bk,nk->bn", x, y), [(4, 8), (6, 8)]),
}


@pytest.mark.parametrize("target", COMPOSITES)
def test_composite_stays_whole(target: str) -> None:
    fn, shapes = COMPOSITES[target]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    recorder = check(Fn(lambda self, *args: fn(*args)), inputs)
    copied = ["aten.clone.default"] if target == "aten.dropout.default" else []
    assert [t for t in recorder.targets() if t != "aten.arange.default"] == [target, *copied]


@pytest.mark.parametrize("rate, training", [(0.0, True), (0.5, False), (0.5, True)])
def test_what_dropout_gives_is_written_in_place(rate: float, training: bool) -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x * 3
        y = F.dropout(kept, rate, training)
        y *= mask
        y[1:].add_(1.0)
        return y, kept * 2  # written, too, where dropout drops nothing

    inputs = [torch.randn(4, 8, requires_grad=True), torch.randn(4, 1)]
    check(Fn(lambda self, *args: fn(*args)), inputs)


def every_part(x: torch.Tensor, y: torch.Tensor, cell: torch.Tensor) -> list[torch.Tensor]:
    """Composites that have no sharding rule, and parts that have one."""
    gates = cell.repeat(3, 1)
    joins = [f([x, y]) for f in (torch.concatenate, torch.hstack, torch.vstack, torch.dstack)]
    joins += [torch.column_stack([x, y]), torch.row_stack([x, y]), torch.cartesian_prod(x[0], y[0])]
    names = [torch.multiply(x, y), torch.subtract(x, y), torch.divide(x, 2), torch.negative(x)]
    names += [torch.absolute(x), torch.arctan(x), torch.true_divide(x, y), torch.fix(x)]
    where = [torch.where(f(x, y), x, y) for f in (torch.less, torch.greater, torch.not_equal)]
    views = [x.moveaxis(0, 1), x.swapaxes(0, 1), x.ravel(), x.view_as(y), x.flipud(), x.fliplr()]
    views += torch.meshgrid(x[0], y[0], indexing="ij")
    sums = [torch.var(x), torch.std(x, 0), *torch.var_mean(x, 1)]
    products = [
        torch.inner(x, y),
        torch.tensordot(x, y, 2),
        torch.kron(x, y),
        torch.ger(x[0], y[0]),
    ]
    losses = [F.kl_div(x, y, reduction="batchmean"), F.poisson_nll_loss(x, y.exp())]
    losses.append(F.margin_ranking_loss(x, y, y.sign()))
    taken = torch.take_along_dim(x, y.sort(-1).indices, -1)
    cells = [torch.gru_cell(x, y, gates, gates), torch.rnn_tanh_cell(x, y, cell, cell)]
    return [*joins, *names, *where, *views, *sums, *products, *losses, taken, *cells]


def test_what_has_no_rule_is_recorded_as_its_parts() -> None:
    inputs = [torch.rand(4, 4, requires_grad=True) + 0.1 for _ in range(3)]
    model = Fn(lambda self, *given: every_part(*given))
    recorder = check(model, inputs)
    calls = [n for n in recorder.graph.graph.nodes if n.op == "call_function"]
    targets = {n.target for n in calls if isinstance(n.target, torch._ops.OpOverload)}
    assert len(targets) > 30
    assert not [one for one in targets if rules_for(one) is None]


def test_an_empty_constant_on_meta() -> None:
    """A key-value cache starts with one, which torch makes no fake tensor on the meta device."""

    def appended(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        start = torch.tensor([], dtype=x.dtype, device=x.device)
        return self.lin(torch.cat([start, x], dim=0))  # type: ignore[no-any-return, operator]

    x = torch.empty(4, 8, device="meta")
    program = autoshard.trace(Fn(appended).to("meta"), (x,), mesh={"tp": 2})
    assert [
        n.meta["val"].shape
        for n in program.serial.graph.find_nodes(
            op="call_function", target=torch.ops.aten.linear.default
        )
    ] == [(4, 8)]


# Metadata


def test_inputs_and_metadata() -> None:
    graph = check(Fn(lambda self, x: self.lin(x)), [x48()]).graph
    placeholders = graph.graph.find_nodes(op="placeholder")
    assert [str(n.target) for n in placeholders] == [
        "l_self_modules_lin_parameters_weight_",
        "l_self_modules_lin_parameters_bias_",
        "l_args_0_",
    ]
    assert [n.meta["val"].requires_grad for n in placeholders] == [True, True, False]
    assert [n.meta["diff"] for n in placeholders] == [True, True, False]
    linear = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
    assert list(linear.meta["nn_module_stack"].values())[-1] == ("L['self'].lin", nn.Linear)
    assert "test_capture.py" in linear.meta["stack_trace"]
    told = {"n_outputs": 1, "mutated": (), "enable_grad": False, "without_gradients": False}
    assert graph.meta == told


def test_annotations_survive() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate({"part": "inner"}):
            x = x.sin()
        return self.lin(x)

    graph = check(Fn(fn), [x48()]).graph
    marks = {str(n.target): n.meta.get("custom") for n in graph.graph.nodes}
    assert marks["aten.sin.default"] == {"part": "inner"}
    assert marks["aten.linear.default"] is None


def test_size_is_linear_in_depth() -> None:
    sizes = [
        len(check(nn.Sequential(*[nn.Linear(8, 8) for _ in range(d)]), [x48()]).graph.graph.nodes)
        for d in (1, 2, 3)
    ]
    assert sizes == [5, 8, 11]


# In-place operators and mutated inputs


def test_in_place_operators() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x).relu_().clone().add_(1)
        y[:, 2:4].mul_(3)
        y[0] = 7
        return y

    recorder = check(Fn(fn), [x48()])
    assert recorder.graph.meta["mutated"] == ()
    assert not any(t.endswith("_.default") for t in recorder.targets())


def test_mutated_buffers() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.cache[1] = x[0]
        self.cache.index_put_((torch.tensor([0, 2]),), x[:2])
        return self.lin(x + self.cache) * self.count

    recorder = check(Fn(fn), [x48()], steps=3)
    names = [n.name for n in recorder.graph.graph.find_nodes(op="placeholder")]
    assert [names[i] for i in recorder.graph.meta["mutated"]] == [
        "l_self_buffers_count_",
        "l_self_buffers_cache_",
    ]


def test_mutated_user_input() -> None:
    def fn(self: Any, x: torch.Tensor) -> Any:
        x.mul_(2)
        return x, self.lin(x)

    graph = check(Fn(fn), [x48()]).graph
    names = [n.name for n in graph.graph.find_nodes(op="placeholder")]
    assert [names[i] for i in graph.meta["mutated"]] == ["l_args_0_"]


def test_batch_norm_running_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    graph = check(model, [torch.randn(2, 3, 6, 6)], steps=3).graph
    assert len(graph.meta["mutated"]) == 3
    assert check(model.eval(), [torch.randn(2, 3, 6, 6)]).graph.meta["mutated"] == ()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_gradient_through_a_tensor_filled_in_place() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, 8)
        torch._dynamo.graph_break()
        out.copy_(self.lin(x))
        torch._dynamo.graph_break()
        return out * 2

    recorder = check(Fn(fn), [x48()], fullgraph=False)
    assert [len(g.meta["mutated"]) for g in recorder.graphs].count(1) == 1


def test_copy_casts_expands_and_does_not_alias() -> None:
    def fn(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        a = torch.zeros(4, 8, dtype=torch.bfloat16)
        b, c, d = torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)
        a.copy_(self.lin(x))
        b.copy_(self.lin.bias)
        c.copy_(y)
        with torch.no_grad():
            d.copy_(self.lin(x))
        y.mul_(2)
        return a, b, c, d * self.lin(x)

    recorder = check(Fn(fn), [x48(), x48()])
    assert not any("copy.default" in target for target in recorder.targets() if "_to" not in target)


def test_inputs_that_exchange_their_values() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        old = self.cache.clone()
        self.cache.copy_(self.other)
        self.other.copy_(old + x)
        return self.lin(x)

    model = Fn(fn)
    model.register_buffer("other", torch.ones(4, 8))
    check(model, [x48()], steps=3)


def test_mutated_input_that_shares_memory_is_refused() -> None:
    def fn(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.lin(x) + y.sum()

    x = x48()
    with pytest.raises(Exception, match="l_args_0_ and l_args_1_ share memory"):
        torch.compile(Fn(fn), backend=Recorder())(x, x[0])
    check(Fn(lambda self, x, y: self.lin(x) + y.sum()), [x, x[0]])


# Shapes


def test_symbolic_batch_and_sequence() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        mask = torch.arange(s)[:, None] >= torch.arange(s)
        scores = (self.lin(x) @ x.transpose(1, 2)).masked_fill(~mask, 0.0)
        return scores.reshape(b * s, s) / s

    recorder = check(Fn(fn), [torch.randn(3, 5, 8)], dynamic=True)
    placeholders = recorder.graph.graph.find_nodes(op="placeholder")
    symbols = [n for n in placeholders if isinstance(n.meta["val"], torch.SymInt)]
    assert len(symbols) == 2
    assert str(recorder.graph.graph.output_node().args[0][0].meta["val"].shape[0]).count("s") == 2


def test_automatic_dynamic_shapes() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        size, y = 2 * x.shape[0], self.lin(x).detach()
        torch._dynamo.graph_break()
        return y * size  # which the first graph returns

    compiled = torch.compile(model := Fn(fn), backend=(recorder := Recorder()))
    for x in map(torch.randn, (2, 3, 5), (8, 8, 8)):
        assert torch.equal(compiled(x), model(x))
    assert len(recorder.graphs) == 4


def test_data_dependent_sizes() -> None:
    def fn(self: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        length = n.item()
        torch._check(length <= 4)
        torch._check(length >= 0)
        return self.lin(x).narrow(0, 0, length).sum() + x[x > 0].sum()

    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        check(Fn(fn), [x48(), torch.tensor(3)])


# Inputs and outputs


def test_outputs_of_every_kind() -> None:
    def fn(self: Any, x: torch.Tensor, flag: bool) -> Any:
        y = self.lin(x)
        return {"y": y, "none": None, "pair": (y.argmax(-1), x), "same": y, "number": 3}

    check(Fn(fn), [x48(), True])


def test_same_tensor_twice_and_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    graph = check(model, [x48()]).graph
    assert len(graph.graph.find_nodes(op="placeholder")) == 4

    x = x48()
    torch._dynamo.reset()
    recorder = Recorder()
    assert torch.equal(torch.compile(torch.add, backend=recorder)(x, x), x + x)


def test_views_of_an_input() -> None:
    def fn(self: Any, x: torch.Tensor) -> Any:
        return x.view(8, 4), x.t(), self.lin(x)

    check(Fn(fn), [x48()])


def test_constants() -> None:
    table = torch.arange(8.0)

    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x) * torch.tensor(0.5) + torch.tensor([1.0, 2.0] * 4)
        return torch.cat([torch.tensor([]), (y + table + torch.tensor([[0.5]])).flatten()])

    made = check(Fn(fn), [x48()]).graph
    for node in made.graph.find_nodes(op="get_attr"):
        assert node.meta["val"].shape == getattr(made, node.target).shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    check(Fn(lambda self, x: self.lin(x).sum(-1)).to(dtype), [x48().to(dtype)])


def test_meta_parameters() -> None:
    recorder = Recorder()
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=recorder)
    assert compiled(torch.randn(4, 8, device="meta")).device.type == "meta"
    assert recorder.graph.graph.output_node().args[0][0].meta["val"].device.type == "meta"


def test_identity_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    allowed = torch.compiler.allow_in_graph(whole)
    monkeypatch.setattr(interpreter, "IDENTITY_TARGETS", {whole})
    torch._dynamo.reset()
    recorder = Recorder()
    x = x48()
    assert torch.equal(torch.compile(lambda t: allowed(t) + 1, backend=recorder)(x), x + 1)


# State of the process


def test_state_is_restored_when_capture_raises() -> None:
    def fn(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return self.lin(x).sin()

    seen: list[Any] = []

    def state() -> Any:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.fx.traceback.has_preserved_node_meta(),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
            torch.get_rng_state().sum().item(),
        )

    def backend(gm: Any, example_inputs: Any) -> Any:
        node = next(n for n in gm.graph.nodes if n.target == "sin")
        node.target = "no_such_method"
        before = state()
        with pytest.raises(CaptureError):
            capture(gm, example_inputs)
        seen.extend([before, state()])
        node.target = "sin"
        return gm

    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(Fn(fn), backend=backend)(x48())
    assert seen[0] == seen[1]
