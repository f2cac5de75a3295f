"""A deep graph by three of its equal layers, which stand for all in a search, and what a mesh of it
does by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autoshard.compiling import label, tandem_repeats
from autoshard.mesh_search.factorisations import AxisSizes, PlanAxes
from autoshard.mesh_search.prices import GAIN
from autoshard.mesh_search.stages import StageOrder
from autoshard.planning import value
from autoshard.runtime import compat
from autoshard.runtime.graph_meta import MUTATED
from autoshard.runtime.operators import PRODUCTS

KEPT = 3
FEWEST = 12
"""Equal layers below which the whole graph is planned at once."""

PLANS = 3
"""Of a deep graph, how many plans are made whole."""


class Screened(NamedTuple):
    """A mesh of a deep graph, by its layers: `rate` is the samples that a rank does in a second, or
    the batches that were given; plan: the axes that are planned; batch: of a micro-batch."""

    mesh: AxisSizes
    order: StageOrder
    rate: float
    fits: bool
    plan: PlanAxes
    batch: int

    @property
    def place(self) -> tuple[bool, float]:
        """Lower for a better mesh."""
        return not self.fits, -self.rate

    def is_quicker(self, before: Screened) -> bool:
        """Whether a mesh is better than another of its plan, as `MeshPrice.is_quicker` has it."""
        gain = GAIN if self.batch > before.batch else 1.0
        return self._replace(rate=self.rate / gain).place < before.place


@dataclass(frozen=True)
class Shallow:
    """A captured graph with three of its `count` equal layers. weights: names, by layer."""

    graph: fx.GraphModule
    inputs: list[compat.GraphInput]
    weights: tuple[frozenset[str], ...]
    count: int


def shallow(captured: fx.GraphModule, inputs: Sequence[compat.GraphInput]) -> Shallow | None:
    """The graph with three of its equal layers; None where it has few, or what is after them reads
    more than the last."""
    nodes = [n for n in captured.graph.nodes if n.op not in ("placeholder", "output")]
    repeats = tandem_repeats([label(node) for node in nodes])
    if not repeats or captured.meta.get(MUTATED):
        return None
    start, one, most = max(repeats, key=lambda one: one[1] * one[2])
    for period, count in ((one, most), (2 * one, most // 2)):  # windows and whole attention
        layers = [nodes[start + i * period :][:period] for i in range(count)]
        if count >= FEWEST and _are_equal(layers):
            return _cut(captured, inputs, layers)
    return None


def _are_equal(layers: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether layers read the same of what is outside, of themselves and of the one before, and
    nothing after them reads another than the last."""
    at = {node: (i, k) for i, layer in enumerate(layers) for k, node in enumerate(layer)}

    def reads(number: int, node: fx.Node) -> list[object]:
        found: list[object] = []
        for one in node.all_input_nodes:
            own = at.get(one)
            if own is not None:
                found.append((number - own[0], own[1]))
            elif one.op == "placeholder" and all(at.get(u, (-1,))[0] == number for u in one.users):
                found.append("weight")
            else:
                found.append(one)
        return found

    for number, layer in enumerate(layers):
        for k, node in enumerate(layer):
            if number > 1 and reads(number, node) != reads(1, layers[1][k]):
                return False
            later = (at.get(user, (len(layers),))[0] for user in node.users)
            if any(one > number + 1 for one in later):
                return False
    return True


def _cut(
    captured: fx.GraphModule,
    inputs: Sequence[compat.GraphInput],
    layers: Sequence[Sequence[fx.Node]],
) -> Shallow:
    gone = {node for layer in layers[KEPT:] for node in layer}
    instead = dict(zip(layers[-1], layers[KEPT - 1]))
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    kept: list[compat.GraphInput] = []
    placeholders = captured.graph.find_nodes(op="placeholder")
    items = dict(zip(placeholders, inputs, strict=True))
    for node in captured.graph.nodes:
        if node in items:
            if node.users and gone.issuperset(node.users):
                continue
            kept.append(items[node])
        if node not in gone:
            made[node] = graph.node_copy(node, lambda one: made[instead.get(one, one)])
    short = fx.GraphModule(captured, graph)
    short.meta = dict(captured.meta)
    weights = tuple(
        frozenset(items[one].name for node in layer for one in node.all_input_nodes if one in items)
        for layer in layers[:KEPT]
    )
    shared = frozenset.intersection(*weights)
    return Shallow(short, kept, tuple(one - shared for one in weights), len(layers))


def experts_of(captured: fx.GraphModule) -> int:
    """How many experts the mixtures of a graph have; 0 where it has none."""
    of = (node.args[1] for node in captured.graph.nodes if str(node.target) in PRODUCTS)
    return max((value(stack).shape[0] for stack in of if isinstance(stack, fx.Node)), default=0)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a captured graph that passes may rewrite; the values are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))  # type: ignore[arg-type]
    made = compat.without_code(gm, graph)
    made.meta = dict(gm.meta)
    return made


def of_plans(found: Iterable[Screened]) -> dict[object, Screened]:
    """The best mesh of each of the best plans."""
    best: dict[object, Screened] = {}
    for one in sorted(found, key=lambda one: one.place):
        if len(best) < PLANS:
            best.setdefault((one.plan, one.batch), one)
    return best
