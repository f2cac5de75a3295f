"""index_functions: what is said of a tensor is what running its graph gives, at every index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.passes.lib.index_functions import IndexFunctions, NotIndexed
from autoshard.passes.lib.index_values import (
    Affine,
    Condition,
    Elements,
    Holds,
    Piecewise,
    Test,
    Value,
)

T = torch.Tensor


def traced(function: Callable[..., Any], *args: Any, symbolic: bool = False) -> fx.GraphModule:
    """The functional ATen graph of a function."""
    mode = "symbolic" if symbolic else "fake"
    return make_fx(function, tracing_mode=mode, pre_dispatch=True)(*args)


def written_out(value: Value, like: T, values: Mapping[fx.Node, T] | None = None) -> T:
    """The tensor that an index function describes, by element; `values`: of unknown tensors."""

    def at(one: Affine | Elements, index: tuple[int, ...]) -> Any:
        if isinstance(one, Elements):
            assert values is not None
            return values[one.source][tuple(at(i, index) for i in one.index)].item() + one.offset
        return one.offset + sum(s * i for s, i in zip(one.slopes, index, strict=True))

    def holds(test: Test, index: tuple[int, ...]) -> bool:
        if isinstance(test, Holds):
            return bool(at(test.elements, index))
        if isinstance(test, Condition):
            left = at(test.left, index)
        else:
            left = at(test.more, index) - at(test.less, index)
        return bool(left == 0 if test.equal else left >= 0)

    def element(index: tuple[int, ...]) -> Any:
        if not isinstance(value, Piecewise):
            return at(value, index)
        return value.yes if all(holds(one, index) for one in value.conditions) else value.no

    found = [element(index) for index in itertools.product(*map(range, like.shape))]
    return torch.tensor(found, dtype=like.dtype).reshape(like.shape)


class Compared(fx.Interpreter):
    """Runs a graph and compares each value that is known with it; counts those."""

    functions: IndexFunctions
    values: dict[fx.Node, Any]
    known = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = result
        if isinstance(result, T) and n.op == "call_function":
            try:
                value = self.functions.of(n)
            except NotIndexed:
                return result
            assert torch.equal(written_out(value, result, self.values), result), n.format_node()
            self.known += 1
        return result


def compared(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """(nodes whose function is known and right, nodes of tensors), static and symbolic alike."""
    counts = []
    for symbolic in (False, True):
        gm = traced(function, *args, symbolic=symbolic)
        runner = Compared(gm)
        runner.functions, runner.values = IndexFunctions(), {}
        runner.run(*args)
        tensors = [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), T)]
        counts.append((runner.known, len([n for n in tensors if n.op == "call_function"])))
    return counts[0]


def positions(x: T) -> T:
    """The tree of Hugging Face's masks: positions that never restart, looked up by row."""
    rows, n = x.shape[0], x.shape[1]
    at = (torch.arange(n) + 0).unsqueeze(0).expand(rows, -1)
    document = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row = torch.arange(rows)[:, None, None, None]
    query, key = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None, :]
    same = document[row, query] == document[row, key]
    return at.new_ones((), dtype=torch.bool) & same & (at[row, key] <= at[row, query])


WHOLE: list[Callable[[T], T]] = [
    positions,
    lambda x: torch.ones(x.shape[1], x.shape[1]).tril(1).bool(),
    lambda x: torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(-2),
    lambda x: torch.arange(3, x.shape[1] + 3)[1:].unsqueeze(0).transpose(0, 1),
    lambda x: torch.arange(0, 12, 3)[::2].reshape(1, 2, 1).squeeze(0).permute(1, 0),
    lambda x: torch.arange(5)[torch.arange(4)[:, None] + torch.zeros(1, 3, dtype=torch.int64)],
    lambda x: torch.ones(2, 4, dtype=torch.int32).cumsum(1) - 1,
    lambda x: ~(torch.arange(6)[:, None] >= torch.arange(6)) & (torch.arange(6) < 9),
    lambda x: torch.where(torch.arange(4)[:, None] == torch.arange(4), 0.0, -3e38) * 2,
    lambda x: (1.0 - torch.ones(3, 3).triu(1)).masked_fill(torch.ones(3, 3).triu(1) > 0, 7.0),
    lambda x: (2 - torch.arange(4)) + torch.arange(4)[:, None],
]


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_the_whole_of_a_tree_is_known_and_right(number: int) -> None:
    known, of = compared(WHOLE[number], torch.zeros(2, 7))
    assert known == of > 0


def unknown_masks(x: T) -> T:
    """Documents, positions and padding of which only a call knows the values."""
    at = (x * 3).to(torch.int64) % 5
    document = (at.diff(prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row = torch.arange(x.shape[0])[:, None, None, None]
    query, key = torch.arange(7)[None, None, :, None], torch.arange(7)[None, None, None, :]
    near = at[row, key] > at[row, query] - 2
    keep = (at > 0)[:, None, None, 1:].logical_and(torch.ones((), dtype=torch.bool))
    past = torch.where((at[row, key] <= at[row, query]) & near, 0.0, -1.0)
    return past[..., 1:] + torch.where(keep & (document[row, query] != 1), 1.0, 1.0)


IN_PART: list[Callable[[T], T]] = [
    unknown_masks,
    lambda x: torch.rand(4, 4) > 0.5,  # drawn
    lambda x: (torch.arange(4) % 2 == 0) & (torch.arange(4) >= 0),
    lambda x: torch.arange(4)[torch.tensor([0, -1])],
    lambda x: torch.arange(4).to(torch.int8) * 100,
    lambda x: torch.arange(4.0)[:, None] >= torch.arange(4.0),
    lambda x: torch.diff(torch.arange(4), prepend=torch.tensor([7])),
    lambda x: (torch.arange(4)[:, None] >= torch.arange(4)) | (torch.arange(4) < 2),
    lambda x: x > 0,
    lambda x: torch.arange(4)[torch.arange(4) - 1],
]


@pytest.mark.parametrize("number", range(len(IN_PART)))
def test_what_is_no_such_function_is_left_unknown(number: int) -> None:
    gm = traced(IN_PART[number], torch.zeros(2, 7))
    out = gm.graph.output_node().all_input_nodes[0]
    if out.meta["val"].dtype.is_floating_point or out.meta["val"].dim() > 2:
        with pytest.raises(NotIndexed):
            IndexFunctions().of(out)
    else:  # by elements of itself, or of what it is made of
        functions = IndexFunctions()
        functions.of(out)
        assert functions.unknown
    compared(IN_PART[number], torch.zeros(2, 7))


def test_an_assumed_input_and_one_without() -> None:
    def padded(keep: T) -> T:
        return keep.bool()[:, None, None, :] & positions(keep)

    gm = traced(padded, torch.ones(2, 5, dtype=torch.int64))
    (given,) = gm.graph.find_nodes(op="placeholder")
    out = gm.graph.output_node().all_input_nodes[0]
    functions = IndexFunctions()
    functions.of(out)
    told = "it depends on keep_1, whose values only a call knows"
    assert {str(reason) for reason in functions.unknown.values()} == {told}
    found = IndexFunctions({given: Affine(1, (0, 0))}).of(out)
    assert torch.equal(written_out(found, out.meta["val"]), positions(torch.ones(2, 5)))


def test_a_million_positions_cost_nothing() -> None:
    with torch.device("meta"):
        gm = traced(positions, torch.zeros(1, 1 << 20, device="meta"))
    out = gm.graph.output_node().all_input_nodes[0]
    assert IndexFunctions().of(out) is not None
