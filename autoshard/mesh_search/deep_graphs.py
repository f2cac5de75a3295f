"""A deep graph by three of its equal layers, which stand for all in a search, and what a mesh of it
does by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autoshard.capture import EqualLayers, own_inputs, short_form, unmark
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
        own = own_inputs(layers) if count >= FEWEST else None
        if own is not None:
            return _cut(captured, inputs, EqualLayers(layers, own))
    return None


def _cut(
    captured: fx.GraphModule, inputs: Sequence[compat.GraphInput], run: EqualLayers
) -> Shallow:
    short, kept = short_form(captured, [run], last=0), list[compat.GraphInput]()
    unmark(short.graph)
    items = dict(zip(captured.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for copy, (node, item) in zip(short.graph.find_nodes(op="placeholder"), items.items()):
        if node.users and not copy.users:
            short.graph.erase_node(copy)
        else:
            kept.append(item)
    short.recompile()
    weights = tuple(frozenset(items[node].name for node in own) for own in run.own[:KEPT])
    return Shallow(short, kept, weights, len(run.layers))


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
