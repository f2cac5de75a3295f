"""One rank's inference graph: few operators, its own weights, one process group, named ports.

`InferencePlan.rank_graph(r)` makes it, for a lowering to any engine:

- operators are those of `core_operators.CORE` and of `operators` (attention, update_cache);
- placeholders are the inputs, then this rank's parts of the weights, then constants;
- a size is an int, a `sym_size` of an input (for rows of experts, of their choices), or integer
  arithmetic on those;
- a collective names one process group, that of the axis tp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.spec import EngineSpec, Extent
from autoshard.runtime.collectives import Axis, State
from autoshard.runtime.compat import fake_kernels
from autoshard.runtime.graph_meta import HELD, ROLE, WEIGHT


@dataclass(frozen=True)
class Port:
    """An input or an output. shape: sizes, or names of dynamic dims or expressions of them.

    role: "input", "output", "lengths" (how many tokens of each row are cached, int32 [batch]),
    "last_tokens" (the place in a call of each row's last token, whose logits are made, int32
    [batch]), "encoded" (what the encoder's engine makes), "key_cache", "value_cache" (inputs, and
    the outputs of the same name that are their memory).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    role: str
    output: bool = False

    @property
    def tensor(self) -> str:
        """The name of the engine's tensor; an updated cache output is `<name>_out`."""
        return f"{self.name}_out" if self.output and self.role.endswith("cache") else self.name


@dataclass(frozen=True)
class QuantizedForm:
    """How a weight is quantized. kind: of the layouts that `quantize=` has. rows: of each matrix
    that is quantized by itself. scale: target of the placeholder of its scales.
    """

    kind: str
    rows: int
    scale: str


@dataclass(frozen=True)
class RankWeight:
    """A parameter of the model, of which a rank holds a part.

    name: as in `named_parameters()`. shape: of the whole. state: how the part is cut from it on
    the axis tp, I or S(dim). dtype: that of the engine, in which it is computed with. quantized:
    how it is held instead, None where it is as it is.
    """

    name: str
    shape: tuple[int, ...]
    state: State
    dtype: torch.dtype
    quantized: QuantizedForm | None = None


@dataclass(frozen=True, kw_only=True)
class RankGraph:
    """See the module's text.

    weights, constants: by the target of their placeholder. symbols: the dynamic dims by name.
    sizes: the name of each symbol of the placeholders' fake values. axis: tp, as this rank sees
    it; its `group` is what collectives name. max_length: tokens a cache holds, None without one.
    whole: with a cache, the graph of whole sequences that it continues. encoder: what an
    encoder-decoder computes once a text, whose outputs are the inputs of role "encoded".
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: Mapping[str, RankWeight]
    constants: Mapping[str, torch.Tensor]
    symbols: Mapping[str, Extent]
    sizes: Mapping[str, str]
    axis: Axis
    max_length: int | None
    whole: fx.GraphModule | None = None
    encoder: RankGraph | None = None

    @property
    def tp(self) -> int:
        """The number of ranks."""
        return self.axis.size

    @property
    def profiles(self) -> list[dict[str, Extent]]:
        """The sizes that are optimised for: those of `symbols`; with a cache, also a call of the
        fewest tokens, which all but the first of a text are."""
        found = [dict(self.symbols)]
        sequence = self.symbols.get("sequence")
        if self.max_length is not None and sequence is not None:
            fewest = sequence.minimum
            if fewest < sequence.maximum:
                found.append({**self.symbols, "sequence": Extent(fewest, fewest, fewest)})
        return found

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.axis.rank


CACHES = ("key_cache", "value_cache")
_INPUTS = (("input",), ("lengths",), ("last_tokens",), CACHES, ("encoded",))
"""The roles of inputs, in their order."""


def inputs_of(graph: fx.Graph, *roles: str) -> list[fx.Node]:
    """The placeholders that a caller gives, in the order of an engine's inputs. roles: of these
    alone."""
    given = graph.find_nodes(op="placeholder")
    return [
        node
        for group in _INPUTS
        for node in given
        if node.meta.get(ROLE) in group and (not roles or node.meta[ROLE] in roles)
    ]


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake mode of a graph's values."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next(val.fake_mode for val in values if hasattr(val, "fake_mode"))


def add_input(after: fx.Node, name: str, shape: Any, dtype: torch.dtype, **meta: object) -> fx.Node:
    """A new placeholder behind another one, with this metadata."""
    with after.graph.inserting_after(after):
        made = after.graph.placeholder(name)
    with fake_mode_of(after.graph):
        made.meta["val"] = torch.empty(shape, dtype=dtype)
    made.meta.update(meta)
    return made


def call_like(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call in the graph of `like`, with its metadata and without a value."""
    made = like.graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in like.meta.items() if k != "val"}
    return made


def valued_call(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call and its value."""
    made = call_like(like, target, *args, **kwargs)
    args, kwargs = fx.node.map_arg((made.args, dict(made.kwargs)), lambda n: n.meta["val"])
    near = (*made.all_input_nodes, made.prev, made.next)  # a constant reads nothing
    tensor = next(n.meta["val"] for n in near if hasattr(n.meta.get("val"), "fake_mode"))
    with fake_kernels(tensor.fake_mode):
        made.meta["val"] = target(*args, **kwargs)
    return made


class Constants:
    """Constants that a pass adds to a graph, named `name` and their number; those alike once."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self._graph, self._name = graph, name
        self._made: list[fx.Node] = []

    def node(self, value: torch.Tensor) -> fx.Node:
        """The placeholder of a constant."""
        for made in self._made:
            held = made.meta[HELD]
            if (held.dtype, held.shape) == (value.dtype, value.shape) and torch.equal(held, value):
                return made
        last = self._graph.find_nodes(op="placeholder")[-1]
        held = value.clone(memory_format=torch.contiguous_format)
        name = f"{self._name}_{len(self._made)}"
        self._made.append(add_input(last, name, value.shape, value.dtype, **{HELD: held}))
        return self._made[-1]


def held_by(graph: fx.Graph, key: str) -> dict[str, Any]:
    """By the target of its placeholder, what the placeholders have of one kind of metadata."""
    nodes = graph.find_nodes(op="placeholder")
    return {str(node.target): node.meta[key] for node in nodes if key in node.meta}


def read_rank_graph(
    module: fx.GraphModule,
    spec: EngineSpec,
    sizes: Mapping[str, str],
    axis: Axis,
    whole: fx.GraphModule | None = None,
    encoder: RankGraph | None = None,
) -> RankGraph:
    """The rank graph that a module is, by the metadata of its placeholders."""
    caches = {str(node.target): node.meta[ROLE] for node in inputs_of(module.graph, *CACHES)}
    results: Any = module.graph.output_node().args[0]
    own = results[: len(results) - len(caches)]
    outputs = []
    for i, node in enumerate(own):
        if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
            raise export_error(f"output {i} of the model is no tensor")
        name = "logits" if len(own) == 1 else f"output_{i}"
        outputs.append(_port(node, sizes, name, "output", True))
    for node, (name, role) in zip(results[len(own) :], caches.items()):
        outputs.append(_port(node, sizes, name, role, True))
    given = inputs_of(module.graph)
    return RankGraph(
        module=module,
        inputs=tuple(_port(node, sizes, str(node.target), node.meta[ROLE]) for node in given),
        outputs=tuple(outputs),
        weights=held_by(module.graph, WEIGHT),
        constants=held_by(module.graph, HELD),
        symbols=spec.extents,
        sizes=sizes,
        axis=axis,
        max_length=spec.max_length,
        whole=whole,
        encoder=encoder,
    )


def _port(
    node: fx.Node, sizes: Mapping[str, str], name: str, role: str, output: bool = False
) -> Port:
    val = node.meta["val"]

    def size(extent: Any) -> int | str:
        if isinstance(extent, int):
            return extent
        return re.sub(r"\bs\d+\b", lambda m: sizes.get(m[0], m[0]), str(extent))

    return Port(name, val.dtype, tuple(map(size, val.shape)), role, output)
