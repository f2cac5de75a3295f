"""The joint graph of five of a graph's equal layers, grown, is that of the graph, node for node."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from autoshard.capture import described, label, tandem_repeats, tensors_of
from autoshard.compiling.repeats import shortened, traced
from autoshard.program import Program
from autoshard.runtime.compat import (
    Short,
    Unequal,
    forward_backward,
    is_backward,
    storage_key,
)
from autoshard.runtime.parameters import ACCUMULATE
from models_hf import DEEP, DEEP_MODELS, loss_of
from models_plain import GatedLayer
from traced import builder


class Stack(nn.Module):
    """Layers that read each other and, where asked, one value in front of all, which is made of a
    constant, too; the loss.

    kept: the number of a layer whose value the loss reads too. rate: of dropout behind each layer.
    """

    def __init__(
        self,
        layers: int = DEEP,
        kept: int | None = None,
        other: int | None = None,
        front: bool = False,
        rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)
        self.layers = nn.ModuleList([GatedLayer(i == other) for i in range(layers)])
        self.front = nn.Linear(8, 8) if front else None
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.front is None else self.front(x) * torch.tensor([1.0, 2.0] * 4)
        values = []
        for layer in self.layers:
            x = self.dropout(layer(x) if bias is None else layer(x + bias))
            values.append(x)
        return x.square().mean() if self.kept is None else (x * values[self.kept]).mean()


@functools.cache
def built(name: str) -> Callable[..., Program]:
    model, batch = DEEP_MODELS[name]
    return builder(loss_of(model()), (), batch(0))


@functools.cache
def stacked(**options: Any) -> Callable[..., Program]:
    return builder(Stack(**options), (torch.ones(4, 6, 8),))


def joint_of(program: Program, short: Short | None = None) -> fx.Graph:
    joints: list[Any] = []
    forward_backward(*program._on_cpu(), lambda *graphs: None, joints, short)
    graph: fx.Graph = joints[0].module.graph
    return graph


def cut_of(program: Program, short: Short | None = None) -> list[fx.Graph]:
    """The forward and the backward."""
    made = forward_backward(*program._on_cpu(), lambda *graphs: None, short=short)
    assert made.backward is not None
    return [made.forward.graph, made.backward.graph]


TOLD = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "custom")
TOLD += ("fwd_source_fn_stack", "recompute", "ac_graph_id", "partitioner_tag", "original_aten")


def assert_equal(whole: fx.Graph, grown: fx.Graph, numbered: bool = True) -> None:
    """Operators, arguments, metadata, and which values are in one memory; numbers of operators, by
    which a graph is cut."""
    assert len(whole.nodes) == len(grown.nodes)
    same: dict[fx.Node, fx.Node] = {}
    memory: dict[int, int] = {}
    forwards = [
        {n.meta["seq_nr"] for n in graph.nodes if "seq_nr" in n.meta and not is_backward(n)}
        for graph in (whole, grown)
    ]
    numbers = set()
    for one, other in zip(whole.nodes, grown.nodes):
        same[one] = other
        given = fx.node.map_arg((one.args, dict(one.kwargs)), same.__getitem__)
        assert given == (other.args, dict(other.kwargs)), (one, other)
        assert one.op == other.op and one.meta.keys() == other.meta.keys(), (one, other)
        assert one.op in ("placeholder", "output") or one.target == other.target, (one, other)
        assert described(one.meta.get("val"), True) == described(other.meta.get("val"), True)
        if one.op == "output":  # what is kept for backward, which Inductor reads
            kinds = [[*map(type, node.meta.get("desc") or ())] for node in (one, other)]
            assert kinds[0] == kinds[1]
        for key in TOLD:
            assert str(one.meta.get(key)) == str(other.meta.get(key)), (key, one, other)
        if numbered and "seq_nr" in one.meta:  # sums of gradients are of no operator of forward's
            pair = [node.meta["seq_nr"] for node in (one, other)]
            ours = [number in known for number, known in zip(pair, forwards)]
            assert ours[0] == ours[1], (one, other)
            numbers |= {pair[0] - pair[1]} if ours[0] else set()
        for mine, theirs in zip(tensors_of(one), tensors_of(other), strict=True):
            assert one.op == "placeholder" or mine is not theirs
            assert mine.requires_grad == theirs.requires_grad
            assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            key, found = storage_key(mine), storage_key(theirs)
            assert memory.setdefault(key, found) == found, (one, other)
    assert len(set(memory.values())) == len(memory) and len(numbers) <= 1


def behind_passes(module: fx.GraphModule, grow: Callable[..., Any], cuts: list[bool]) -> Short:
    """Grown as under Inductor, behind its passes over the joint graph. cuts: gets whether what is
    cut of that comes out equal."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def passes(joint: fx.Graph, cut: Any = None) -> Any:
        assert joint.owning_module is not None
        joint_graph_passes(joint.owning_module)
        cuts.append(False)
        made = grow(joint, cut)
        cuts[-1] = cut is not None
        return made

    return Short(module, passes, "")


def check(program: Program, cut: bool = True) -> None:
    """Compare, where it is short at all. cut: whether it is cut before it grows."""
    gm, _ = program._on_cpu()
    short = shortened(gm)
    assert short is not None and len(short.module.graph.nodes) < 0.9 * len(gm.graph.nodes)
    assert_equal(joint_of(program), joint_of(program, short))
    whole = behind_passes(gm, lambda joint, cut: () if cut is None else cut(), [])
    short = behind_passes(short.module, short.grow, cuts := [])
    assert_equal(joint_of(program, whole), joint_of(program, short))
    cuts.clear()
    for one, other in zip(cut_of(program, whole), cut_of(program, short)):
        assert_equal(one, other, numbered=False)
    assert cuts == ([True] if cut else [False, False])


def operators_of(program: Program) -> list[fx.Node]:
    nodes = program.graph_module.graph.nodes
    return [node for node in nodes if node.op not in ("placeholder", "output")]


MESHES: list[dict[str, int]] = [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}]


@pytest.mark.parametrize(
    "mesh", [*MESHES[:2], pytest.param(MESHES[2], marks=pytest.mark.slow)], ids=str
)
def test_layers_that_read_one_value(mesh: dict[str, int]) -> None:
    """Its gradient is summed up from layer to layer."""
    check(stacked(front=True)(mesh))


@pytest.mark.parametrize(
    ("mesh", "rng"),
    [
        (MESHES[0], "invariant"),
        pytest.param(MESHES[1], "invariant", marks=pytest.mark.slow),
        pytest.param(MESHES[0], "tracker", marks=pytest.mark.slow),
    ],
)
def test_layers_that_draw(mesh: dict[str, int], rng: str) -> None:
    check(stacked(front=True, rate=0.1)(mesh, rng=rng))


class Checkpointed(nn.Module):
    """Checkpointed layers that end in a sum with a bias, and what reads the last sum."""

    def __init__(self) -> None:
        super().__init__()
        layer = (nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.layers = nn.ModuleList([copy.deepcopy(nn.Sequential(*layer)) for _ in range(DEEP)])
        self.head = nn.Linear(32, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: x + layer(x), x, use_reentrant=False)
        return self.head(x)


def test_what_is_kept_of_the_last_layer_alone() -> None:
    """Its bias, as backward computes again what the head reads."""
    program = builder(Checkpointed(), (torch.ones(32, 64, 32),))({"tp": 2})
    kept = []
    for short in (None, shortened(program._on_cpu()[0])):
        forward, backward = cut_of(program, short)
        results: Any = forward.output_node().args[0]
        given = [node.name for node in backward.find_nodes(op="placeholder")]
        kept.append([node.name for node in results[1:]])
        assert kept[-1] == given[:-1] and "tangents" in given[-1]
    assert short is not None and len({*map(len, kept)}) == 1
    assert len({sum("primals" in name for name in names) for names in kept}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("name", DEEP_MODELS)
def test_models(name: str, mesh: dict[str, int]) -> None:
    check(built(name)(mesh))


@pytest.mark.parametrize(
    "options",
    [{"layers": 6}, {"kept": 3}, {"other": 3}],
    ids=["few", "a value that is read behind the next layer", "unequal"],
)
def test_traced_whole(options: dict[str, int]) -> None:
    assert shortened(stacked(**options)({"tp": 2})._on_cpu()[0]) is None


def test_gradients_that_are_accumulated_in_inputs_are_traced_whole() -> None:
    program = stacked(front=True)({"dp_shard": 2}, microbatch=ACCUMULATE, zero=1)
    assert shortened(program.graph_module) is None


def test_layers_of_which_some_are_computed_again() -> None:
    """Copies are those of one layer, so that only the joint graph grows."""
    program = stacked(front=True, layers=10)({"tp": 2})
    run = tandem_repeats([label(node) for node in operators_of(program)])[0]
    start, period, count = run
    assert count == 10
    for node in operators_of(program)[start + 5 * period : start + 7 * period]:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 1
    check(program, cut=False)


def test_what_has_a_budget_of_kept_bytes_is_cut_of_all_layers() -> None:
    gm = fx.symbolic_trace(nn.Identity())
    asked: list[bool] = []

    def grow(joint: fx.Graph, cut: Any = None) -> Any:
        asked.append(cut is not None)
        return () if cut is None else cut()

    short = Short(gm, grow, "")
    for budget in (1, 0.5):
        with torch._functorch.config.patch(activation_memory_budget=budget):
            assert len(short.cut(gm, lambda joint: (joint, joint))) == 2
    assert asked == [True, False]


def test_where_the_joint_graph_is_not_that_of_equal_layers() -> None:
    gm, _ = stacked(front=True)({"tp": 2})._on_cpu()
    joint = fx.Graph()
    joint.output((joint.placeholder("primals_1"),))
    asked: list[Short | None] = []

    def trace(short: Short | None) -> str:
        asked.append(short)
        if short is not None:
            short.grow(joint)
        return "whole"

    assert traced(gm, trace) == "whole" and len(asked) == 2 and asked[1] is None


def test_graphs_without_gradients_are_traced_whole() -> None:
    gm, fakes = stacked(front=True)({"tp": 2})._on_cpu()
    short = shortened(gm)
    frozen = [fake.detach() for fake in fakes]
    with pytest.raises(Unequal):
        forward_backward(gm, frozen, lambda *graphs: None, short=short)


def test_caches_know_how_many_layers_there_are() -> None:
    keys = []
    for layers in (DEEP, DEEP + 1):
        short = shortened(stacked(front=True, layers=layers)({"tp": 2})._on_cpu()[0])
        assert short is not None
        keys.append(short.key)
    assert keys[0] != keys[1]
