"""The tokens of a graph with a cache beside those of the whole graph, computed on the CPU.

Both are one rank's, with its weights. What ranks send each other is a stand-in, the same in both:
each rank's own part, as often as there are ranks. So no rank waits for another, and the numbers are
not the model's; that what is cached says what is not cached is seen as well.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.graph import RankGraph, held_by
from autoshard.runtime.graph_meta import HELD

Runner = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Inputs by name -> outputs by name."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""The largest relative difference of a token's outputs, by norm, that rounding makes."""

_TOKENS, _PROMPT = 12, 6
_REMEDY = (
    "Export without a cache (no max_length), and report the model: its graph was taken for one "
    "that a cache can continue."
)


def whole_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, its weights and constants placeholders still."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, copy)


def stand_in(operation: str, x: torch.Tensor, graph: RankGraph) -> torch.Tensor:
    """What a collective returns where every rank holds what this one does, unsummed."""
    if operation.startswith("all_gather"):
        return torch.cat([x] * graph.tp)
    if operation.startswith("reduce_scatter"):
        return x.chunk(graph.tp)[graph.rank]
    return x


def torch_runner(gm: fx.GraphModule, graph: RankGraph, held: Mapping[str, torch.Tensor]) -> Runner:
    """A graph of one rank, run by torch. held: weights and constants by placeholder."""
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]

    def run(given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        values = [given[name] if name in given else held.get(name) for name in names]
        with torch.no_grad():
            outputs = _Alone(gm, graph).run(*values)
        return {port.tensor: value for port, value in zip(graph.outputs, outputs)}

    return run


class _Alone(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, graph: RankGraph) -> None:
        super().__init__(gm)
        self._rank_graph = graph

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        return stand_in(target._schema.name.split("::")[1], args[0], self._rank_graph)


def check_cached(
    graph: RankGraph, weights: Mapping[str, torch.Tensor], cached: Runner | None = None
) -> None:
    """Raise ExportError where a cached token has other outputs than in the whole sequence.

    Nothing to do for a graph without a cache. weights: this rank's, by placeholder. cached: runs
    what was made of the graph; None: the graph itself.
    """
    if graph.whole is None or graph.max_length is None:
        return
    held = {**graph.constants, **held_by(graph.whole.graph, HELD), **weights}
    whole = torch_runner(graph.whole, graph, held)
    cached = cached or torch_runner(graph.module, graph, held)
    extent = graph.symbols["sequence"]
    least, prompt = extent.minimum, min(max(_PROMPT, extent.minimum), extent.maximum)
    prompt = min(prompt, graph.max_length)
    length = min(graph.max_length, max(_TOKENS, prompt + 4 * least))
    given = _inputs(graph, length)
    expected = whole(given)
    last = next((port.name for port in graph.inputs if port.role == "last_tokens"), None)
    names = [p.tensor for p in graph.outputs if p.role == "output"]
    if last is None:
        names = [p.tensor for p in graph.outputs if p.tensor in names and "sequence" in p.shape]
    shapes = {p.tensor: p.shape for p in graph.outputs}
    dims = {name: 1 if last else shapes[name].index("sequence") for name in names}
    batch = next(iter(given.values())).shape[0]
    # the second row's prompt is shorter, and filled up behind its end with tokens that are others
    shorter = max(prompt - 2, 1)
    past = [shorter if row % 2 else prompt for row in range(batch)]
    first = _part(graph, given, [0] * batch, prompt)
    ids = next(port.name for port in graph.inputs)
    first[ids][1::2, shorter:] = 0
    caches = {
        port.name: torch.zeros([batch, *map(int, port.shape[1:])], dtype=port.dtype)
        for port in graph.inputs
        if port.role.endswith("cache")
    }
    start, count, seen = [0] * batch, prompt, past
    while True:
        lengths = next(port.name for port in graph.inputs if port.role == "lengths")
        feed = {**first, **caches, lengths: torch.tensor(start, dtype=torch.int32)}
        if last is not None:
            places = [one - past - 1 for one, past in zip(seen, start)]
            feed[last] = torch.tensor(places, dtype=torch.int32)
        out = cached(feed)
        for name in names:
            for row in range(batch):
                begin = start[row] if last is None else seen[row] - 1
                want = expected[name].movedim(dims[name], 1)[row, begin : seen[row]]
                have = out[name].movedim(dims[name], 1)[row, : seen[row] - begin]
                _compare(name, have, want, begin)
        caches = {name: out[f"{name}_out"] for name in caches}
        start, count = seen, least
        if max(start) + count > length:
            return
        seen = [one + count for one in start]
        first = _part(graph, given, start, count)


def _inputs(graph: RankGraph, length: int) -> dict[str, torch.Tensor]:
    """Random values for the caller's inputs, of `length` tokens."""
    generator = torch.Generator().manual_seed(0)
    symbols = graph.symbols
    batch = min(2, symbols["batch"].maximum) if "batch" in symbols else 1
    batch = max(batch, symbols["batch"].minimum) if "batch" in symbols else batch
    sizes = {"batch": batch, "sequence": length}
    assert graph.whole is not None
    lookups = graph.whole.graph.find_nodes(
        op="call_function", target=torch.ops.aten.embedding.default
    )
    # every table in which an input is looked up has so many rows
    rows = [n.args[0].meta["val"].shape[0] for n in lookups if n.args[1].op == "placeholder"]
    highest = min((int(size) for size in rows), default=16)
    found = {}
    for port in graph.inputs:
        if port.role not in ("input", "encoded"):
            continue
        shape = [size if isinstance(size, int) else sizes[size] for size in port.shape]
        if port.dtype.is_floating_point:
            found[port.name] = torch.randn(shape, generator=generator).to(port.dtype)
        else:
            found[port.name] = torch.randint(highest, shape, generator=generator).to(port.dtype)
    return found


def _part(
    graph: RankGraph, given: Mapping[str, torch.Tensor], start: list[int], count: int
) -> dict[str, torch.Tensor]:
    """`count` tokens of each row, from its own start."""
    cut = {}
    for port in graph.inputs:
        if port.role in ("input", "encoded"):
            value = given[port.name]
            if "sequence" in port.shape:
                rows = [value[row, one : one + count] for row, one in enumerate(start)]
                value = torch.stack(rows)
            cut[port.name] = value
    return cut


def _compare(name: str, have: torch.Tensor, want: torch.Tensor, start: int) -> None:
    tolerance = TOLERANCE.get(want.dtype, 0.0)
    if have.shape != want.shape:
        raise export_error(
            f"token {start} with the cache has {name} of shape {[*have.shape]}, in the whole "
            f"sequence {[*want.shape]}",
            remedy=_REMEDY,
        )
    for i, (one, other) in enumerate(zip(have.flatten(1).double(), want.flatten(1).double())):
        finite = other.isfinite()
        same = torch.allclose(one[~finite], other[~finite], rtol=0, atol=0, equal_nan=True)
        error = float((one - other)[finite].norm() / other[finite].norm().clamp_min(1e-30))
        if same and error <= tolerance:
            continue
        tokens = (int(one.nan_to_num().argmax()), int(other.nan_to_num().argmax()))
        raise export_error(
            f"token {start + i} with the cache is not the token of the whole sequence: {name} "
            f"differs by {error:.2g} of its norm, {tolerance:.2g} is rounding; the largest is "
            f"entry {tokens[0]}, not {tokens[1]}",
            remedy=_REMEDY,
        )
