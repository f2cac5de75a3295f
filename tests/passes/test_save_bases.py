"""save_bases: no view of an input or a result is kept, and both graphs compute what they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.passes.save_bases import save_bases
from autoshard.runtime.compat import viewed

Graphs = tuple[fx.GraphModule, fx.GraphModule]


def transposed(x: Any, w: Any, b: Any) -> Any:
    return x @ w, b.t(), w.t(), w


def parts(x: Any, w: Any, b: Any) -> Any:
    first, last = w.split(2)
    return x @ w, b.unsqueeze(0), first, last.t()


def alone(x: Any, w: Any, b: Any) -> Any:
    return x @ w, x.exp(), w.t(), b.view(-1)


def of_a_result(x: Any, w: Any, b: Any) -> Any:
    product = x @ w
    return product, product.t(), b.t(), product.view(-1)


def cut(kept: Callable[..., Any], symbolic: bool) -> Graphs:
    """A forward that keeps all results but one, and a backward of what it keeps."""
    values = torch.randn(3, 4), torch.randn(4, 5), torch.randn(4, 5)
    mode = "symbolic" if symbolic else "real"
    forward = make_fx(kept, tracing_mode=mode)(*values)
    saved = forward.graph.output_node().args[0][1:]
    graph = fx.Graph()
    given = [graph.placeholder(node.name) for node in saved]
    for node, one in zip(saved, given):
        one.meta = dict(node.meta)
    graph.output(tuple(graph.call_function(torch.sin, (one,)) for one in given))
    return forward, fx.GraphModule({}, graph)


def run(forward: fx.GraphModule, backward: fx.GraphModule, *values: Any) -> list[Any]:
    result, *saved = forward(*values)
    return [result, *backward(*saved)]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("kept", [transposed, parts, alone, of_a_result])
def test_both_graphs_compute_what_they_did(kept: Callable[..., Any], symbolic: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 4), torch.randn(4, 5), torch.randn(4, 5)
    forward, backward = cut(kept, symbolic)
    before = run(forward, backward, *values)
    assert save_bases(forward, backward, 1) >= 2
    for ours, right in zip(run(forward, backward, *values), before, strict=True):
        assert torch.equal(ours, right)
    saved: Any = forward.graph.output_node().args[0]
    assert not any(map(viewed, saved[1:]))
    names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert names == [node.name for node in saved[1:]]
    assert len(set(names)) == len(names)


def test_an_input_that_the_graph_writes_is_left_alone() -> None:
    def written(x: Any, w: Any, b: Any) -> Any:
        kept = x @ w, w.t(), b.t()
        torch.ops.aten.copy_.default(b, w)
        return kept

    forward, backward = cut(written, symbolic=False)
    assert save_bases(forward, backward, 1) == 1
    kept: Any = forward.graph.output_node().args[0]
    assert [node.op for node in kept[1:]] == ["placeholder", "call_function"]
