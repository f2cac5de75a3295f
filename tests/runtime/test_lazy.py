"""Outputs gathered at their first use: free until then, ordinary tensors after."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from autoshard.runtime import compat, lazy_parts
from autoshard.runtime.collectives import redistribution as collectives
from autoshard.runtime.collectives.axis import Axis, chunk_bounds
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.lazy_gather import LazyGather, lazy, wrap_outputs
from autoshard.runtime.mesh import init_mesh
from gloo_pool import GlooPool

WHOLE = torch.arange(28, dtype=torch.float32).view(4, 7).sin()


def part(state: str, axis: Axis) -> torch.Tensor:
    """This rank's part of WHOLE: rows or columns, or an addend."""
    if state == "P":
        weights = torch.arange(1.0, axis.size + 1)
        return WHOLE * (weights[axis.rank] / weights.sum())
    dim = int(state[2])
    return WHOLE.narrow(dim, *chunk_bounds(WHOLE.shape[dim], axis)).clone()


def wrapped(state: str, axis: Axis) -> tuple[torch.Tensor, LazyGather]:
    """A leaf that holds this rank's part, and the lazy whole computed from it."""
    leaf = part(state, axis).requires_grad_()
    extent = None if state == "P" else WHOLE.shape[int(state[2])]
    out = lazy(leaf * 1.0, state, axis, extent)
    assert isinstance(out, LazyGather)
    return leaf, out


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: x * 2 + 1,
    "index": lambda x: x[1:, ::2],
    "item": lambda x: x[2, 3].item(),
    "view": lambda x: x.view(-1)[5:9],
    "loss": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 6, 3])),
    "numpy": lambda x: x.detach().numpy(),
    "tolist": lambda x: x.tolist(),
    "copy": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "cast": lambda x: x.detach().double(),
    "data": lambda x: x.data + 1,
    "max": lambda x: x.max(-1),
    "stack": lambda x: torch.stack([x, x]),
    "bool": lambda x: bool((x > -2).all()),
    "iteration": lambda x: list(x),
    "format": lambda x: f"{x[0, 0]:.3f}",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("state", ["S(0)", "S(1)", "P"])
def test_any_use_sees_the_whole(use: str, state: str) -> None:
    expected = USES[use](WHOLE.clone())

    def rank(axis: Axis) -> Any:
        got = USES[use](wrapped(state, axis)[1])
        return got.full_tensor() if isinstance(got, LazyGather) else got

    for got in run_ranks(2, rank):
        torch.testing.assert_close(got, expected) if not isinstance(got, str) else None
        assert not isinstance(got, str) or got == expected


KEPT: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "rows in another order": ("S(1)", lambda x: x.index_select(0, torch.tensor([2, 2, 0, 3, 1]))),
    "columns in another order": ("S(0)", lambda x: x.index_select(-1, torch.tensor([6, 0]))),
    "another dtype": ("S(1)", lambda x: x.to(torch.float64)),
    "clone": ("S(0)", torch.clone),
    "deepcopy": ("S(1)", copy.deepcopy),
    "cropped": ("S(1)", lambda x: x[1:-1]),
    "cropped again": ("S(1)", lambda x: x[1:][:-1].clone()),
    "rows by number": ("S(1)", lambda x: x[torch.tensor([2, 2, 0]), ...]),
    "columns by number": ("S(0)", lambda x: x[:, torch.tensor([[5, 0], [1, 2]])]),
    "repeated": ("S(1)", lambda x: x.repeat_interleave(3, dim=0)),
    "reset": ("S(0)", lambda x: x.clone().zero_()),
    "cut into rows and stacked": ("S(1)", lambda x: torch.stack([x[i][None] for i in (2, 0)])),
    "cut, stacked, squeezed": ("S(1)", lambda x: torch.stack([x[:1], x[2:3]], 1).squeeze(0)),
    "joined": ("S(1)", lambda x: torch.cat([x[2:], x])),
    "joined to an empty cache": ("S(0)", lambda x: torch.cat([torch.tensor([]), x], -1)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_cache_goes_through_stays_a_shard(name: str) -> None:
    state, use = KEPT[name]

    def rank(axis: Axis) -> tuple[bool, torch.Tensor]:
        got = use(wrapped(state, axis)[1].detach())
        kept = isinstance(got, LazyGather) and not got.gathered
        assert kept and got.stride() == use(WHOLE).stride()
        return got._value.local.numel() < got.numel(), got.add(0)

    for kept, got in run_ranks(2, rank):
        assert kept
        torch.testing.assert_close(got, use(WHOLE.clone()), rtol=0, atol=0)


def test_a_row_of_what_is_split_is_split_along_another_dim() -> None:
    def rank(axis: Axis) -> tuple[str, str]:
        whole = wrapped("S(1)", axis)[1].detach()
        row, deep = whole[-1], whole.unsqueeze(0)
        assert isinstance(row, LazyGather) and isinstance(deep, LazyGather)
        return row.state_on(axis), deep.state_on(axis)

    assert run_ranks(2, rank) == [("S(0)", "S(2)")] * 2


@pytest.mark.parametrize("first", ["the view", "the whole", "neither"])
def test_a_view_and_its_whole_are_one_memory(first: str) -> None:
    """Whichever is read before the write."""

    def write(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = whole[1:3][1]
        if first != "neither":
            (view if first == "the view" else whole).add(0)
        view.mul_(-2)
        whole[0].zero_()
        return whole + 0, view + 0

    for got in run_ranks(2, lambda axis: write(wrapped("S(1)", axis)[1].detach())):
        torch.testing.assert_close(got, write(WHOLE.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("keepdim", [False, True])
def test_the_likeliest_word_needs_no_logits(
    n: int, keepdim: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bfloat16 logits that a caller makes float32, with ties; words are split unevenly."""
    logits = torch.randint(-3, 3, (5, 2, 7), generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[0, -1, 4] = torch.nan
    moved: list[torch.Size] = []
    original = lazy_parts.all_gather
    monkeypatch.setattr(
        lazy_parts, "all_gather", lambda x, axis: (moved.append(x.shape), original(x, axis))[1]
    )

    def rank(axis: Axis) -> torch.Tensor:
        part = logits.narrow(2, *chunk_bounds(7, axis)).clone()
        last = lazy(part, "S(2)", axis, 7)[:, -1].to(copy=True, dtype=torch.float32)
        found = last.argmax(-1, keepdim=keepdim)
        assert last.dtype == torch.float32 and not last.gathered  # type: ignore[attr-defined]
        return torch.cat([found.view(-1), last.argmax(0).view(-1), last.argmax().view(-1)])

    last = logits[:, -1].float()
    wanted = [last.argmax(-1), last.argmax(0), last.argmax()]
    for got in run_ranks(n, rank):
        assert torch.equal(got, torch.cat([one.view(-1) for one in wanted]))
    assert set(moved) == {torch.Size([2, 5, 1])}


def test_a_wider_copy_travels_in_the_narrow_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.dtype] = []
    original = collectives.all_gather
    monkeypatch.setattr(
        collectives, "all_gather", lambda x, axis: (moved.append(x.dtype), original(x, axis))[1]
    )
    narrow = WHOLE.bfloat16()

    def rank(axis: Axis) -> torch.Tensor:
        return lazy(narrow.narrow(1, *chunk_bounds(7, axis)), "S(1)", axis, 7).float() + 0

    for got in run_ranks(2, rank):
        torch.testing.assert_close(got, narrow.float(), rtol=0, atol=0)
    assert moved == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x.clone().add(0)], 1),
        lambda x: torch.stack([x[:, :3], x.t()[:3].t()]),
        lambda x: x.squeeze(0),
    ],
    ids=["along the split dim", "part and whole", "views", "one row a rank"],
)
def test_other_joins_read_the_whole(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for got in run_ranks(4, lambda axis: use(wrapped("S(0)", axis)[1].detach()).add(0)):
        torch.testing.assert_close(got, use(WHOLE), rtol=0, atol=0)


def test_an_order_of_what_is_split_reads_the_whole() -> None:
    order = torch.tensor([3, 1, 0, 2])
    for got in run_ranks(2, lambda axis: wrapped("S(0)", axis)[1].index_select(0, order)):
        torch.testing.assert_close(got, WHOLE[order], rtol=0, atol=0)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("state", ["S(0)", "S(1)", "P"])
def test_gradients_are_cut_back(state: str, n: int) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return x[1:, ::2].float().pow(2).sum() + x.view(-1)[3] * 2 + (x.relu() * x).mean()

    def rank(axis: Axis) -> tuple[Axis, torch.Tensor]:
        leaf, out = wrapped(state, axis)
        (loss(out) + out.full_tensor()[0, 0]).backward()
        return axis, leaf.grad

    serial = WHOLE.clone().requires_grad_()
    (loss(serial) + serial[0, 0]).backward()
    for axis, grad in run_ranks(n, rank):
        whole = serial.grad
        if state != "P":
            dim = int(state[2])
            whole = whole.narrow(dim, *chunk_bounds(whole.shape[dim], axis))
        torch.testing.assert_close(grad, whole)


def test_in_place_operators_are_seen_by_later_reads() -> None:
    def rank(axis: Axis) -> torch.Tensor:
        leaf, out = wrapped("S(1)", axis)
        out.mul_(3)
        out[0] = 0
        names, context = out.__tensor_flatten__()
        again = LazyGather.__tensor_unflatten__(
            {name: getattr(out, name) for name in names}, context, out.shape, out.stride()
        )
        assert torch.equal(again + 0, out.detach() + 0)  # what a compiled graph would receive
        assert isinstance(out, LazyGather)
        out.sum().backward()
        assert not leaf.grad[0].any() and (leaf.grad[1:] == 3).all()
        return out + 0

    expected = WHOLE * 3
    expected[0] = 0
    for got in run_ranks(2, rank):
        torch.testing.assert_close(got, expected)


def test_metadata_and_repr_are_free_and_a_read_is_paid_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    original = collectives.all_gather
    monkeypatch.setattr(
        collectives, "all_gather", lambda x, axis: (calls.append(axis.rank), original(x, axis))[1]
    )

    def rank(axis: Axis) -> int:
        _, out = wrapped("S(1)", axis)
        alias = out.detach()
        assert out.shape == (4, 7) and out.dtype == torch.float32 and out.requires_grad
        assert out.stride() == (7, 1) and out.device.type == "cpu" and out.dim() == 2
        assert repr(out).startswith("LazyGather(shape=(4, 7), dtype=torch.float32, S(1) on tp;")
        assert isinstance(out, torch.Tensor) and not out.gathered and not alias.requires_grad
        before = calls.count(axis.rank)
        out.sum(), alias.sum(), out.full_tensor()
        assert alias.gathered and repr(out).startswith("tensor([[")
        return before * 10 + calls.count(axis.rank)

    assert run_ranks(2, rank) == [1, 1]


def test_the_part_of_what_was_read_is_one_tensor_and_up_to_date() -> None:
    """Dynamo compares the parts of two inputs while it guards them."""

    def rank(axis: Axis) -> torch.Tensor:
        whole = wrapped("S(1)", axis)[1].detach()
        assert isinstance(whole, LazyGather)
        whole.mul_(2)
        first = whole._local
        whole.mul_(3)
        assert whole._local is first
        return first

    torch.testing.assert_close(torch.cat(run_ranks(2, rank), 1), WHOLE * 6)


def test_a_compiled_graph_takes_crops_of_any_length() -> None:
    """Crops from behind and from both ends, whose bounds Dynamo must not make symbols of."""
    axis = Axis("tp", 2, 0, "offline:tp")
    graphs = []

    def zeros(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return lambda *args: [torch.zeros(1) for _ in gm.graph.output_node().args[0]]

    compiled = torch.compile(lambda cache, x: torch.cat([cache, x], 1), backend=zeros)
    with torch.no_grad():
        for length, cropped, added in [(10, 1, 4), (13, 2, 3), (16, 3, 5), (20, 2, 7), (9, 4, 2)]:
            cache = lazy(torch.ones(2, length), "S(0)", axis)
            compiled(cache[:, :-cropped], torch.ones(4, added))
            compiled(cache[:, cropped:-1], torch.ones(4, added))
    assert len(graphs) <= 3


def test_wrap_outputs_leaves_the_rest_alone() -> None:
    axis = Axis("tp", 2, 0, "offline:tp")
    outputs = (torch.ones(2), torch.ones(3, 2), None, torch.ones(2, 4), 5)
    got = wrap_outputs(outputs, ("I", "S(0)", "I", "P", "I"), (None, 5, None, None, None), axis)
    assert got[0] is outputs[0] and got[2] is None and got[4] == 5
    assert got[1].shape == (5, 2) and got[3].shape == (2, 4)
    assert [isinstance(x, LazyGather) for x in got] == [False, True, False, True, False]


def test_an_output_that_only_the_outer_axis_splits_is_lazy(world_of_four: None) -> None:
    up, down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    model = torch.nn.Sequential(up, torch.nn.ReLU(), down)
    options = {"mesh": {"cp": 2, "tp": 2}, "inner": "aot_eager", "timeout": 20}
    out = torch.compile(model, backend="autoshard", options=options)(torch.ones(2, 6, 8))
    assert isinstance(out, LazyGather) and out.shape == (2, 6, 8)
    assert out._local.shape == (2, 3, 8)


def column_backend(
    gm: fx.GraphModule, inputs: Sequence[Any], *, axis: Axis, graphs: list[list[str]]
) -> Callable[..., Any]:
    """Runs the graph; a graph that multiplies gives its output sharded on its columns."""
    found = compat.graph_inputs(gm)
    graphs.append([type(item.real).__name__ for item in found])
    names = [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"]

    def run(*args: Any) -> Any:
        outputs = gm.forward(*[v.full_tensor() if isinstance(v, LazyGather) else v for v in args])
        if "matmul" not in names:
            return outputs
        return tuple(
            lazy(x.narrow(1, *chunk_bounds(x.shape[1], axis)), "S(1)", axis, x.shape[1])
            for x in outputs
        )

    return run


def run_graph_break() -> tuple[list[list[str]], int]:
    axis = init_mesh({"tp": 2}, "cpu").axis("tp")
    graphs: list[list[str]] = []
    torch.manual_seed(0)
    first, x = torch.randn(5, 7, requires_grad=True), torch.randn(3, 5)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x @ first
        torch._dynamo.graph_break()
        return logits.pow(2).sum(), logits

    compiled = torch.compile(
        model, backend=functools.partial(column_backend, axis=axis, graphs=graphs)
    )
    for _ in range(2):
        loss, logits = compiled(x)
        expected, expected_logits = model(x)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(logits + 0, expected_logits)
        first.grad = None
        expected.backward()
        wanted = first.grad.clone()
        first.grad = None
        loss.backward()
        # the narrow that stands for a sharded computation leaves each rank its own columns
        mine = wanted.clone()
        start, length = chunk_bounds(7, axis)
        mine[:, :start] = 0
        mine[:, start + length :] = 0
        torch.testing.assert_close(first.grad, mine)
    return graphs, len(graphs)


def test_a_graph_break_hands_it_to_the_next_graph(gloo2: GlooPool) -> None:
    for graphs, calls in gloo2(run_graph_break):
        assert calls == 2, graphs
        assert "LazyGather" in graphs[1], graphs
