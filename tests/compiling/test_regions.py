"""Equal stretches of a graph are one region, and what runs is the graph's own arithmetic."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import utils
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard.capture import tandem_repeats
from autoshard.compiling.regions import GraphPart, parts_of
from autoshard.passes import COLLECTIVES
from autoshard.program import Program
from autoshard.runtime.compat import inductor_regions
from autoshard.runtime.compat.inductor_regions import compile_parts, in_regions
from gloo_pool import GlooPool
from models_plain import GatedLayer
from side_by_side import Pair, check
from traced import builder


class Stack(nn.Module):
    """Layers, of which one may have another gate, with dropout where asked; the loss."""

    def __init__(self, layers: int, other: int | None = None, rate: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)
        self.layers = nn.ModuleList([GatedLayer(i == other) for i in range(layers)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x))
        return self.head(x).square().mean()


@functools.cache
def built(layers: int, other: int | None, rate: float) -> Callable[..., Program]:
    return builder(Stack(layers, other, rate), (torch.ones(4, 6, 8),))


@functools.cache
def graphs(
    axis: str, layers: int, other: int | None = None, rate: float = 0.0
) -> tuple[fx.GraphModule, ...]:
    size = 1 if axis == "dp_replicate" else 2
    running = built(layers, other, rate)({axis: size}, planner={"bucket_bytes": 8000}).running
    assert running.backward is not None
    return running.forward, running.backward


def repeated(labels: str, start: int, period: int) -> int:
    """How often the period that begins there is there, one after another."""
    alike = range(start, len(labels) - period)
    run = next((i for i in alike if labels[i] != labels[i + period]), max(len(labels) - period, 0))
    return (run - start) // period + 1


@pytest.mark.parametrize("seed", range(30))
def test_repeats_are_those_of_all_that_are_there(seed: int) -> None:
    draw = random.Random(seed)
    labels = ""
    for _ in range(draw.randint(1, 3)):
        labels += "".join(draw.choices("vwxyz", k=draw.randint(0, 12)))
        layer = "".join(draw.sample("abcdefghijklmnopqr", draw.randint(7, 18)))
        labels += layer * draw.randint(1, 5) + layer[: draw.randint(0, 4)]
    found = tandem_repeats(labels)
    for start, period, count in found:
        assert period >= 8 and count >= 3 and repeated(labels, start, period) >= count
    most = 0
    for start, period in itertools.product(range(len(labels)), range(8, len(labels) // 2 + 1)):
        if (count := repeated(labels, start, period)) >= 3:
            most = max(most, (count - 1) * period)
            # all of it is in what was found, but for less than three of its periods
            inside = [
                s <= i < s + p * c
                for i in range(start, start + period * count)
                for s, p, c in found
            ]
            assert sum(inside) > (count - 3) * period
    assert most == max(((count - 1) * period for _, period, count in found), default=0)
    ends = [start + period * count for start, period, count in found]
    assert all(a <= b for a, (b, *_) in zip(ends, found[1:]))


def regions(gm: fx.GraphModule) -> list[GraphPart]:
    found = parts_of(gm)
    assert found is not None
    return found


CONVOLUTION = torch.ops.aten.convolution.default
SIGMOID, TANH = torch.ops.aten.sigmoid.default, torch.ops.aten.tanh.default
AXES = ["tp", "dp_shard"]
PATIENCE = 500.0  # seconds of two processes that compile kernels


@pytest.mark.parametrize("axis", AXES)
def test_as_many_regions_for_any_depth(axis: str) -> None:
    few, many = ([regions(gm) for gm in graphs(axis, n)] for n in (8, 12))
    for less, more in zip(few, many):
        most = [max(Counter(part.key for part in parts).values()) for parts in (less, more)]
        assert most[1] == most[0] + 4
        if axis == "tp":  # buckets are of so many bytes
            assert len({part.key for part in more}) == len({part.key for part in less}) <= 4


def test_layers_that_draw_are_one_region() -> None:
    """Of forward; backward reads masks."""
    for layers in (8, 12):
        parts = regions(graphs("tp", layers, rate=0.1)[0])
        assert max(Counter(part.key for part in parts).values()) >= layers - 1
        assert len({part.key for part in parts}) <= 4


@pytest.mark.parametrize("axis", AXES)
def test_every_operator_once_and_collectives_in_their_order(axis: str) -> None:
    for gm in graphs(axis, 12):
        nodes = [node for part in regions(gm) for node in part.nodes]
        constants = {node for part in regions(gm) for node in part.constants}
        assert len(set(nodes)) == len(nodes)
        operators = {n for n in gm.graph.nodes if n.op not in ("placeholder", "output")}
        assert constants.isdisjoint(nodes) and constants.union(nodes) == operators
        moved = [node for node in nodes if node.target in COLLECTIVES]
        assert moved == [node for node in gm.graph.nodes if node.target in COLLECTIVES]


def test_an_unequal_layer_is_not_shared() -> None:
    parts = regions(graphs("tp", 12, 4)[0])
    counts = Counter(part.key for part in parts)
    by_layer = [
        counts[part.key] for part in parts for n in part.nodes if n.target in (SIGMOID, TANH)
    ]
    assert by_layer[4] == 1 and by_layer.count(max(by_layer)) >= 10


class Counting:
    """In the place of Inductor: runs a graph as it is, and counts the graphs. What a graph may
    write to holds no number afterwards."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.free = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any, *rest: Any, **options: Any) -> Any:
        self.graphs.append(gm)
        outputs: Any = gm.graph.output_node().args[0]
        values = [node.meta["val"] for node in outputs]
        context = TracingContext.try_get()
        free = context.fw_metadata.bw_donated_idxs if context is not None else None

        def run(given: list[torch.Tensor]) -> Any:
            found = gm(*given)
            for i in free or ():
                self.free += given[i].nbytes
                given[i].fill_(torch.nan)
            return found

        return SimpleNamespace(
            current_callable=run,
            output_strides=[tuple(map(str, v.stride())) for v in values],
            counter_deltas=Counter(),
            source_code="",
            device_types=set(),
            device_idxs=set(),
            _compile_context=None,
        )


def inputs_of(gm: fx.GraphModule) -> list[torch.Tensor]:
    torch.manual_seed(0)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [torch.randn(fake.shape, dtype=fake.dtype) for fake in fakes]


@pytest.mark.parametrize("backward", [False, True])
def test_the_graphs_own_numbers(backward: bool) -> None:
    gm = graphs("dp_replicate", 8)[backward]
    count = Counting()
    parts = regions(gm)
    made = compile_parts(gm, parts, {}, count)
    assert made is not None and len(count.graphs) == len({part.key for part in parts}) < len(parts)
    values = inputs_of(gm)
    expected: Sequence[Any] = gm(*values)
    given = list(values)
    found = made._run(given)
    assert not given  # what the caller does not hold is freed when it was read last
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one is other is None or torch.equal(one, other)


def test_a_region_writes_to_nothing_that_is_read_later() -> None:
    """Neither where it may: in what another part reads, is viewed by it, or is a result."""

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last, later, viewed, result, kept = given
        x = later * 2 + last + result + kept
        seen = viewed.view(8, 4) * 1
        return later + x, viewed.view(8, 4) + seen, result

    values = [torch.randn(4, 8) for _ in range(5)]
    with FakeTensorMode():
        gm = make_fx(function)(*[torch.empty(4, 8) for _ in values])
    given = gm.graph.find_nodes(op="placeholder")
    *nodes, before, view, after = [n for n in gm.graph.nodes if n.op == "call_function"]
    parts = []
    for i, own in enumerate([nodes, [before], [view, after]]):
        reads = dict.fromkeys(n for node in own for n in node.all_input_nodes if n not in own)
        made = tuple(n for n in own if any(user not in own for user in n.users))
        exact = (True,) * len(made)
        parts.append(GraphPart(tuple(own), (), tuple(reads), made, exact, {}, i, {}, False))
    count, context = Counting(), TracingContext(None)
    metadata: Any = SimpleNamespace(bw_donated_idxs=[0, 1, 2, 3])
    context.fw_metadata = metadata
    with tracing(context):
        compiled = compile_parts(gm, parts, {}, count, options={"is_backward": True})
    assert compiled is not None and len(given) == len(values)
    expected: Sequence[torch.Tensor] = [each.clone() for each in gm(*values)]
    kept = values[4].clone()
    for one, other in zip([*compiled._run(list(values)), values[4]], [*expected, kept]):
        assert torch.equal(one, other)
    assert values[0].isnan().all() and count.free == 2 * values[0].nbytes


def most_alive(steps: Sequence[tuple[Sequence[Any], Sequence[Any]]], kept: set[Any]) -> int:
    """Bytes at the peak of (reads, makes) steps, each value freed after it is read last."""
    last = {node: i for i, (reads, _) in enumerate(steps) for node in reads}
    alive, peak = 0, 0

    def size(node: fx.Node) -> int:
        val = node.meta.get("val")
        is_view = getattr(node.target, "is_view", False)
        return 0 if is_view or not isinstance(val, torch.Tensor) else val.nbytes

    for i, (reads, makes) in enumerate(steps):
        alive += sum(map(size, makes))
        peak = max(peak, alive)
        alive -= sum(size(n) for n in {*reads, *makes} - kept if last.get(n, i) == i)
    return peak


@pytest.mark.parametrize("axis", AXES)
def test_nothing_lives_longer(axis: str) -> None:
    for gm in graphs(axis, 12):
        kept = {*gm.graph.output_node().all_input_nodes, *gm.graph.find_nodes(op="placeholder")}
        nodes = [node for part in regions(gm) for node in part.nodes]
        steps = [(node.all_input_nodes, [node]) for node in gm.graph.nodes if node in set(nodes)]
        parted = [(node.all_input_nodes, [node]) for node in nodes]
        assert most_alive(parted, kept) <= 1.02 * most_alive(steps, kept)


def six_layers(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
    for weight in weights:
        y = x @ weight
        x = x + ((y.sin() + 1) * y.cos() - y.abs()).tanh() * 0.5
    return (x.sum(0),)


def compile_layers(x: Callable[[], torch.Tensor] = lambda: torch.ones(4, 8)) -> Any:
    """Six layers, traced with [4, 8] and compiled for `x`. Kernels are left out, which take seconds
    to compile: what calls them is the same code."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner

    kernels = mock.Mock(return_value=lambda *pointers: None)
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = [torch.ones(4, 8), *[torch.ones(8, 8) for _ in range(6)]]
        gm = make_fx(six_layers)(*fakes)
        fakes[0] = x()
    torch._dynamo.utils.counters.clear()
    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", kernels),
        tracing(TracingContext(detect_fake_mode(fakes))),
        in_regions(parts_of),
    ):
        return compile_fx_inner(gm, fakes, static_input_idxs=[1, 2, 3, 4, 5, 6])


def test_inductors_cache_holds_the_regions() -> None:
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        first, second = compile_layers(), compile_layers()
        assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 1
    assert len(first.regions) == len(second.regions) < len(first.calls) == len(second.calls)
    values = [torch.ones(4, 8), *[torch.ones(8, 8) for _ in range(6)]]
    assert second(values)[0].shape == (8,) and not values


def test_an_input_may_lie_otherwise_than_it_was_traced() -> None:
    """As a convolution's result that forward saved; its code asserts strides."""
    from torch._inductor.utils import fresh_cache

    def x() -> torch.Tensor:
        return torch.ones(8, 4).mT

    with fresh_cache():
        made = compile_layers(x)
    assert len(made.regions) < len(made.calls)
    assert made([x(), *[torch.ones(8, 8) for _ in range(6)]])[0].shape == (8,)
    between = [each for one in made.regions for each in one.output_strides if each != ("1",)]
    assert between and set(between) == {("8", "1")}  # none by columns, as the first is


@pytest.mark.parametrize("convolved", [False, True])
def test_layers_hand_on_what_is_contiguous_but_to_a_convolution(convolved: bool) -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            y = torch.conv2d(x, weight, padding=1) if convolved else x * weight.sum()
            x = x + ((y.sin() + 1) * y.cos() - y.abs()).tanh() * 0.5
        return x.sum(0)

    with FakeTensorMode():
        x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
        gm = make_fx(function)(x, *[torch.empty(3, 3, 3, 3) for _ in range(6)])
    between = {node for part in regions(gm)[:-1] for node in part.outputs}
    assert len(between) > 2 and not any(n.meta["val"].is_contiguous() for n in between)
    read = {n for n in between if any(u.target is CONVOLUTION for u in n.users)}
    assert set(regions(gm)[0].laid_out) == between - read and bool(read) is convolved


def train(folder: str, mesh: dict[str, int], layers: int) -> dict[str, Any]:
    """Three steps beside the serial model from an empty cache, and from what is in it then: parts
    and regions of each graph that was compiled, and what was compiled and loaded."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches

    from autoshard.runtime.compat import inductor_regions

    found: list[tuple[int, int]] = []

    def counted(gm: fx.GraphModule, parts: list[GraphPart], *rest: Any) -> Any:
        made = compile_parts(gm, parts, *rest)
        found.append((len(parts), len(made.regions)) if made is not None else (0, 0))
        return made

    def trained() -> dict[str, Any]:
        torch._dynamo.reset()
        clear_caches()
        counters.clear()
        torch.manual_seed(0)
        pair = Pair(Stack(layers), inner="inductor", mesh=mesh, planner={"bucket_bytes": 8000})
        xs = [torch.randn(4, 6, 8) for _ in range(3)]
        pair.train([lambda model, x=x: model(x) for x in xs])
        return {**pair.result(), "cache": dict(counters["inductor"])}

    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
        mock.patch.object(inductor_regions, "compile_parts", counted),
    ):
        jobs = [trained(), trained()]
    clear_caches()
    return {"jobs": jobs, "regions": found}


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "layers"), [("tp", 8), ("dp_shard", 12)])
def test_two_processes_train_as_serial_and_start_warm(
    gloo2: GlooPool, tmp_path: Path, axis: str, layers: int
) -> None:
    results = gloo2(train, str(tmp_path), {axis: 2}, layers, pool_timeout=PATIENCE)
    check([job for result in results for job in result["jobs"]])
    made = [pair for result in results for pair in result["regions"]]
    assert len(made) == 2 and all(0 < regions < parts for parts, regions in made), made
    for job, (missed, hit) in enumerate([(2, 2), (0, 4)]):
        caches = [result["jobs"][job]["cache"] for result in results]
        assert sum(cache.get("fxgraph_cache_miss", 0) for cache in caches) == missed, caches
        assert sum(cache.get("fxgraph_cache_hit", 0) for cache in caches) == hit, caches


def test_inductor_fills_its_table_of_dtypes_once() -> None:
    """And again where it knows more operators."""
    filled: list[object] = []
    with mock.patch.object(DtypePropagationOpsHandler, "__init__", filled.append):
        with inductor_regions._rules_told_once():
            both = [DtypePropagationOpsHandler() for _ in range(2)]
            assert filled == both[:1]
            with mock.patch.dict(utils.op_dtype_propagation_rules, {"another": None}):
                assert filled == [DtypePropagationOpsHandler()] * 2
