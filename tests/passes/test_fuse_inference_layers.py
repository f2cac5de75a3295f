"""fuse_inference_layers: which regions are one operator, and that no value changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import fx, nn

import autoshard
from autoshard.passes.base import Context, Report
from autoshard.passes.fuse_inference_layers import FuseInferenceLayers
from autoshard.runtime.collectives.axis import Axis, chunk_bounds
from autoshard.runtime.collectives.fused import reduce_add_norm
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.collectives.states import shard_dim
from autoshard.runtime.parameters import unshard
from autoshard.verification.program_check import verify_program
from traced import programs

T = torch.Tensor


class Rms(nn.Module):
    """A norm as Llama writes it; weigh_wide: as Gemma does."""

    def __init__(self, width: int, weigh_wide: bool = False) -> None:
        super().__init__()
        self.weight, self.weigh_wide = nn.Parameter(torch.rand(width)), weigh_wide

    def forward(self, x: T) -> T:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.weigh_wide:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "written rms": Rms,
    "written wide": lambda width: Rms(width, weigh_wide=True),
}


class Layers(nn.Module):
    """Two layers of a row-split product, the residual and a norm."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(64, 16, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(NORMS[norm](16) for _ in range(2))
        self.head = nn.Linear(16, 8, bias=False)

    def forward(self, x: T) -> T:
        normed = x
        for up, down, norm in zip(self.up, self.down, self.norms):
            x = x + down(up(normed).relu())
            normed = norm(x)
        out: T = self.head(normed)
        return out


@pytest.mark.parametrize("rows", [1, 16], ids=["decode", "prompt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_a_region_is_one_operator_of_the_same_value(
    norm: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows > 1:  # a prompt has more rows than a small sum
        monkeypatch.setattr("autoshard.planning.cost.model.ONE_SHOT_BYTES", 0)
    model = Layers(norm).to(dtype).requires_grad_(False)
    x = torch.randn(2, rows, 16, dtype=dtype)
    with torch.no_grad():
        (program,), values = programs(model, (x,), [{"mesh": {"tp": 2}}])
        found = program.graph_module.graph.find_nodes(op="call_function", target=reduce_add_norm)
        assert len(found) == 2
        assert {node.kwargs["norm"] for node in found} == {norm.replace("wide", "rms")}
        states = [(node.args[4], node.kwargs.get("gather", False)) for node in found]
        if rows == 1:
            assert states == [("I", False)] * 2
        elif dtype == torch.float32 and norm != "layer":
            # the head of the prompt reads the second norm as it is split
            assert states == [("S(0)", True), ("S(0)", False)]
        assert verify_program(program, values).worst[1] < (1e-6 if dtype.itemsize == 4 else 1e-2)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_whose_weight_is_gathered(norm: str) -> None:
    """Over the ranks of another axis: what the norm reads is no input of the graph."""
    model, x = Layers(norm).requires_grad_(False), torch.randn(2, 1, 16)
    with torch.no_grad():
        (program,), values = programs(model, (x,), [{"mesh": {"dp_shard": 2, "tp": 2}}])
        graph = program.graph_module.graph
        assert len(graph.find_nodes(op="call_function", target=reduce_add_norm)) == 2
        assert len(graph.find_nodes(op="call_function", target=unshard)) >= 7
        assert verify_program(program, values, others=[values]).worst[1] < 1e-6


@pytest.mark.parametrize("state", ["I", "S(0)", "S(1)"])
def test_rows_that_the_axis_does_not_divide(state: str) -> None:
    """Of the written norm; each rank adds its part of the residual."""
    addends, h, weight = torch.randn(2, 5, 3, 8), torch.randn(5, 3, 8), torch.rand(8)
    total = addends.sum(0) + h
    normed = F.rms_norm(total, [8], weight, 1e-6)
    dim = shard_dim(state)

    def rank(axis: Axis) -> tuple[T, T]:
        mine = h if dim is None else h.narrow(dim, *chunk_bounds(h.shape[dim], axis))
        extent = None if dim is None else h.shape[dim]
        options: dict[str, Any] = {"norm": "written rms", "eps": 1e-6, "wide": torch.float32}
        options |= {"gather": dim is not None, "extent": extent}
        return reduce_add_norm(addends[axis.rank], mine, weight, None, state, axis, **options)

    found = run_ranks(2, rank)
    parts = [part for part, _ in found]
    torch.testing.assert_close(parts[0] if dim is None else torch.cat(parts, dim), total)
    for _, whole in found:
        torch.testing.assert_close(whole, normed)


def graph_of(build: Callable[[fx.Graph, fx.Node, fx.Node], Any], change: str = "I") -> Report:
    """What the pass says of a graph of a reduction and what `build` adds; h is a residual."""
    graph, axis = fx.Graph(), Axis("tp", 2, 0, "offline:tp")
    partial, residual, weight = (graph.placeholder(name) for name in ("p", "h", "w"))
    for node, shape in ((partial, (4, 8)), (residual, (4, 8)), (weight, (8,))):
        node.meta["val"] = torch.empty(shape)
    reduced = graph.call_function(redistribute, (partial, "P", change, axis))
    reduced.meta["val"] = torch.empty(4, 8)
    out = build(graph, reduced, residual)
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(4, 8))
    graph.output((out,))
    return FuseInferenceLayers().run(fx.GraphModule({}, graph), Context(axis))


def add(graph: fx.Graph, a: Any, b: Any) -> fx.Node:
    return graph.call_function(torch.ops.aten.add.Tensor, (a, b))


def norm_of(graph: fx.Graph, x: fx.Node) -> fx.Node:
    weight = next(node for node in graph.nodes if node.target == "w")
    return graph.call_function(torch.ops.aten.rms_norm.default, (x, [8], weight, 1e-6))


def read_twice(graph: fx.Graph, reduced: fx.Node, residual: fx.Node) -> Any:
    total = add(graph, residual, reduced)
    return add(graph, norm_of(graph, total), reduced)


def read_before(graph: fx.Graph, reduced: fx.Node, residual: fx.Node) -> Any:
    total = add(graph, residual, reduced)
    early = graph.call_function(torch.ops.aten.neg.default, (total,))
    return add(graph, norm_of(graph, total), early)


DECLINED: dict[str, tuple[Callable[..., Any], str]] = {
    "2 operators read the sum": (read_twice, "I"),
    "the sum is not added to a residual": (lambda g, x, h: norm_of(g, x), "I"),
    "no norm over the last dim follows": (lambda g, x, h: add(g, h, x), "I"),
    "the residual is read before it is normalised": (read_before, "I"),
    "the sum is split along the dim that is normalised": (
        lambda g, x, h: norm_of(g, add(g, h, x)),
        "S(1)",
    ),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_says_why_it_declines(reason: str) -> None:
    build, change = DECLINED[reason]
    report = graph_of(build, change)
    assert (report.hits, [skip.reason for skip in report.skips]) == (0, [reason])


def test_the_smallest_region() -> None:
    report = graph_of(lambda g, x, h: norm_of(g, add(g, x, h)))
    assert (report.hits, report.skips) == (1, [])


def test_layers_with_gradients_stay_as_they_are() -> None:
    program = autoshard.trace(Layers("rms"), (torch.ones(3, 4, 16),), mesh={"tp": 2})
    assert not program.graph_module.graph.find_nodes(op="call_function", target=reduce_add_norm)


SIZES: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 3}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 64, "n_positions": 16}
FAMILIES = {
    "Llama": {**SIZES, **LLAMA},
    "Qwen3": {**SIZES, **LLAMA, "head_dim": 8, "num_key_value_heads": 2},
    "GPT2": {**GPT2, "bos_token_id": 0, "eos_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_in_launches_and_in_bytes(family: str) -> None:
    """Each of the two reductions of a layer is a region, and moves one token's width."""
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    model = kind(kind.config_class(**FAMILIES[family])).eval().requires_grad_(False)
    with torch.no_grad():
        program = autoshard.trace(model, (torch.zeros(2, 1, dtype=torch.int64),), mesh={"tp": 2})
        found = program.graph_module.graph.find_nodes(op="call_function", target=reduce_add_norm)
        moved = Counter((one.op, one.bytes) for one in program.collectives())
        assert len(found) == moved["all_reduce", 2 * 32 * 4] == 6
        assert sum(count for (op, _), count in moved.items() if op == "all_reduce") == 6
        if family == "GPT2":  # the text takes seconds
            assert "6 x a sum, the residual and a norm" in program.explain()
