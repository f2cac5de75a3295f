"""Views: the shape arithmetic against brute force, and symbolic sizes without new guards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard.planning.operators import cached, is_handed_on, unflattened
from autoshard.planning.rules.registry import strategies
from autoshard.planning.rules.views import size_entry
from autoshard.planning.strategy import ImplCollective, Strategy
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.states import I, P, R, S, shard_dim
from autoshard.runtime.operators.vocabulary import loss_over_tokens
from oracle import check, node_of

aten = torch.ops.aten
FACTORS = draw.lists(draw.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5)


@given(data=draw.data(), n=draw.sampled_from([2, 3, 4]))
@settings(max_examples=150, deadline=None, database=None)
def test_reshape_offers_exactly_what_brute_force_finds(data: Any, n: int) -> None:
    """S(d) -> S(e) is right where the chunks of a reshape are the reshaped chunks."""
    factors = data.draw(FACTORS)
    before, after = (_merged(data, data.draw(draw.permutations(factors))) for _ in range(2))
    x = torch.arange(math.prod(factors), dtype=torch.float64).reshape(before)
    node, tensors = node_of(aten.reshape.default, (x, after), {})
    found = [s for s in strategies(node, n)[0] if s.inputs[0][0] == "S" and s.impl is None]
    for strategy in found:
        check(node, tensors, strategy, n)
    even = {(s.inputs[0], s.output) for s in found if _even(before, after, s, n)}
    assert even == {
        (S(d), S(e))
        for d in range(len(before))
        for e in range(len(after))
        if _right(x, after, d, e, n)
    }


def _merged(data: Any, factors: list[int]) -> list[int]:
    """The factors, in this order, some neighbours multiplied together."""
    shape = [1]
    for factor in factors:
        if data.draw(draw.booleans()):
            shape.append(factor)
        else:
            shape[-1] *= factor
    return shape


def _even(before: list[int], after: list[int], strategy: Strategy, n: int) -> bool:
    d, e = shard_dim(strategy.inputs[0]), shard_dim(strategy.output)  # type: ignore[arg-type]
    assert d is not None and e is not None
    return before[d] % n == 0 and after[e] % n == 0


def _right(x: torch.Tensor, after: list[int], d: int, e: int, n: int) -> bool:
    if x.shape[d] % n or after[e] % n:
        return False
    local = [size // n if i == e else size for i, size in enumerate(after)]
    whole = x.reshape(after).chunk(n, e)
    return all(torch.equal(x.chunk(n, d)[r].reshape(local), whole[r]) for r in range(n))


def symbolic(function: Any, *args: torch.Tensor) -> tuple[fx.Node, ShapeEnv]:
    """The last operator of `function` traced with every size symbolic."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(arg) for arg in args]
    graph = make_fx(function, tracing_mode="real", pre_dispatch=True)(*fakes).graph
    nodes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return nodes[-1], environment


IDS = torch.zeros(4, 6, dtype=torch.int64)
CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...], Any]] = {
    "split heads": (
        lambda x: x.view(x.shape[0], x.shape[1], 4, -1),
        (torch.randn(6, 10, 32),),
        (S(1),),
        S(1),
    ),
    "merge tokens": (lambda x: x.reshape(-1, x.shape[2]), (torch.randn(4, 7, 6),), (S(0),), S(0)),
    "linear": (torch.nn.functional.linear, (torch.randn(4, 6), torch.randn(8, 6)), (S(0), R), S(0)),
    "broadcast": (torch.add, (torch.randn(4, 6), torch.randn(1, 6)), (S(0), R), S(0)),
    "attention": (
        torch.nn.functional.scaled_dot_product_attention,
        tuple(torch.randn(2, 4, 6, 8) for _ in range(3)),
        (S(1), S(1), S(1)),
        S(1),
    ),
    "embedding": (
        lambda w, i: torch.nn.functional.embedding(i, w),
        (torch.randn(10, 8), IDS),
        (R, S(1)),
        S(1),
    ),
    "gather": (lambda x, i: x.gather(1, i), (torch.randn(4, 6), IDS), (S(0), S(0)), S(0)),
    "index": (lambda x, i: x[i], (torch.randn(10, 8), IDS), (R, S(0)), S(0)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (torch.randn(4, 6),) * 2, (S(0), S(0)), S(0)),
    "mean": (lambda x: x.mean(1), (torch.randn(4, 6),), (S(1),), P),
    "loss": (
        lambda x, y: torch.nn.functional.mse_loss(x, y),
        (torch.randn(4, 6), torch.randn(4, 6)),
        (S(0), S(0)),
        P,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_symbolic_sizes_are_sharded_without_new_guards(name: str) -> None:
    function, args, inputs, output = CASES[name]
    node, environment = symbolic(function, *args)
    guards = len(environment.guards)
    found, _ = strategies(node, 2)
    assert (inputs, output) in [(s.inputs, s.output) for s in found]
    assert len(environment.guards) == guards


def test_a_loss_over_any_number_of_tokens_on_another_axis() -> None:
    scores, target = torch.randn(8, 6), torch.zeros(8, dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy
    node, environment = symbolic(lambda x, y: loss(x, y), scores, target)
    of_scores, of_target = (one.meta for one in node.all_input_nodes)
    rows = of_target["val"].shape[0]
    of_scores["val"] = of_scores["val"].new_empty(rows, 6)
    guards = len(environment.guards)
    node.kwargs = {"op": node.target, "axis": Axis("cp", 2, 0, "offline:cp")}
    node.target = loss_over_tokens
    found, _ = strategies(node, 2)
    by_classes = next(one for one in found if one.inputs[0] == S(1))
    assert by_classes.traffic == (
        ImplCollective("all_reduce", 8 * 4),
        ImplCollective("all_reduce", 2 * 8 * 4),
    )
    assert len(environment.guards) == guards


def test_a_symbolic_size_whose_hint_does_not_divide_is_declined() -> None:
    node, _ = symbolic(torch.relu, torch.randn(7, 6))
    found, reasons = strategies(node, 2)
    assert [s.output for s in found] == [I, R, S(1)]
    assert "aten.relu.default: ...1 7 % 2 != 0" in reasons


@pytest.mark.parametrize(
    ("op", "args", "dim", "entry"),
    [
        ("reshape", (torch.randn(4, 6), [2, 2, 6]), 1, (1, 1)),
        ("expand", (torch.randn(4, 1), [4, 6]), 1, (1, 1)),
        ("unflatten", (torch.randn(3, 8, 5), 1, [2, 4]), 1, (2, 0)),
        ("unflatten", (torch.randn(3, 8, 5), -2, [2, 4]), 2, (2, 1)),
        ("unflatten", (torch.randn(3, 8, 5), 1, [2, 4]), 0, None),
        ("transpose", (torch.randn(3, 8), 0, 1), 0, None),
    ],
)
def test_where_a_view_says_a_size(
    op: str, args: tuple[Any, ...], dim: int, entry: tuple[int, int] | None
) -> None:
    packet = getattr(aten, op)
    node, _ = node_of(getattr(packet, packet.overloads()[0]), args, {})
    assert size_entry(node, dim) == entry


def test_keys_are_known_through_heads_that_are_repeated() -> None:
    def attend(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        few = aten.mul.Tensor(x, 2.0)  # 2 of 4 heads
        heads = aten.expand.default(aten.unsqueeze.default(few, 2), [1, 2, 2, 5, 8])
        heads = aten.view.default(aten.clone.default(heads), [1, 4, 5, 8])
        scores = aten.scaled_dot_product_attention.default(heads, heads, heads)
        part, same = aten.slice.Tensor(few, 2, 1), aten.clone.default(few)
        return scores, part, same, aten.slice.Tensor(aten.mul.Tensor(few, 3.0), 2, 1)

    graph = fx.symbolic_trace(attend).graph
    scores, part, same, other = graph.output_node().args[0]
    assert cached(part) is cached(same) is part.args[0]
    assert cached(scores) is cached(other) is None
    assert list(map(is_handed_on, (part, same, scores, other))) == [True, True, False, False]


def test_what_other_operators_read_second_is_no_key() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> Any:
        summed = aten.mul.Tensor(x, 2.0)
        return aten.add.Tensor(y, summed), aten.slice.Tensor(summed, 0, 1)

    _, part = fx.symbolic_trace(add).graph.output_node().args[0]
    assert cached(part) is None


@pytest.mark.parametrize(
    ("before", "after", "dims", "is_it"),
    [
        ((2, 3, 4), (6, 4), 3, True),
        ((2, 3, 4), (2, 12), 3, False),
        ((2, 3, 4), (6, 4), 2, False),
        ((2, 12), (6, 4), 3, False),
        ((2, 3, 4), (2, 3, 4), 3, False),
    ],
)
def test_the_first_two_dims_as_one(
    before: tuple[int, ...], after: tuple[int, ...], dims: int, is_it: bool
) -> None:
    gm = make_fx(lambda x: aten.reshape.default(x, after), pre_dispatch=True)(torch.ones(before))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.reshape.default)
    assert unflattened(node, dims) is (node.args[0] if is_it else None)
    assert unflattened(node.args[0], len(before) + 1) is None
