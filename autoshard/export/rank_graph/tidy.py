"""tidy: what a rank graph does that makes no difference goes, and sizes are those of its inputs.

    before                                      after
    %ids: i64[s0,s1]    %size_s1: s1            %ids: i64[s0,s1]
    %0: f32[s0,s1] = _to_copy(%x, f32)          %0: s1 = sym_size(%ids, 1)
    %1: f32[s0,s1] = mul(%0, 1)                 %1: f32[s1] = arange(0, %0, 1)
    %2: f32[s1] = arange(0, %size_s1, 1)

drop_unread: weights and constants that nothing reads go.

    before                                      after
    %weight_0: f32[4]    %constant_0: i64[8]    %weight_0: f32[4]
    return (%weight_0)                          return (%weight_0)

name_placeholders: each placeholder is named by what it stands for, and says what that is.

    before                                      after
    %l_self_modules_up_..._weight_: f32[4,8]    %weight_0: f32[4,8]        WEIGHT: up.weight, S(0)
    %l_ids_: i64[s0,s1]                         %ids: i64[s0,s1]           ROLE: input
    %s0: s0                                     %size_s0: s0
    %0: f32[] = constant(_tensor_constant0)     %constant_0: f32[]         HELD: its value

Tensors that the graph holds become placeholders too: an exporter asks one place for all of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.graph import RankWeight, fake_mode_of, inputs_of
from autoshard.export.spec import DIMS
from autoshard.passes import Context, Pass, Report, replace
from autoshard.runtime import compat
from autoshard.runtime.collectives import State
from autoshard.runtime.graph_meta import HELD, ROLE, WEIGHT

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_COPIES = (
    *(aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default),
    *(aten.lift_fresh_copy.default, aten.lift_fresh.default, _c10d.wait_tensor.default),
)
_OPTIONS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


@dataclass(frozen=True)
class Tidy(Pass):
    """See the module's text: copies, conversions to the type a value has, sums with 0, ... go."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        sizes_from_inputs(graph, inputs_of(graph))
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _OPTIONS}
            if node.target in _COPIES or _keeps_value(node):
                replace(node, node.all_input_nodes[0])
                report.hits += 1
        graph.eliminate_dead_code()


@dataclass(frozen=True)
class DropUnread(Pass):
    """See the module's text."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        gm.graph.eliminate_dead_code()
        for node in gm.graph.find_nodes(op="placeholder"):
            if not node.users and (WEIGHT in node.meta or HELD in node.meta):
                gm.graph.erase_node(node)
                report.hits += 1


def propagate(graph: fx.Graph) -> None:
    """Compute `meta["val"]` of every node that has none, or that reads one whose shape changed."""
    changed: set[fx.Node] = set()
    with compat.fake_kernels(fake_mode_of(graph)):
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            before = node.meta.get("val")
            if before is not None and not any(n in changed for n in node.all_input_nodes):
                continue
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            node.meta["val"] = val = node.target(*args, **kwargs)
            if before is None or not _same(before, val):
                changed.add(node)


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and str(before.shape) == str(after.shape)


def sizes_from_inputs(graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    """Let each symbolic size be that of the first of these inputs which has it."""
    known: dict[str, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]
    for node in reversed(inputs):
        for dim, extent in enumerate(node.meta["val"].shape):
            if isinstance(extent, int) or str(extent) in known:
                continue
            with graph.inserting_after(last):
                size = graph.call_function(aten.sym_size.int, (node, dim))
            size.meta["val"] = extent
            known[str(extent)] = size
    for node in list(graph.nodes):
        val = node.meta.get("val")
        plain_size = isinstance(val, torch.SymInt) and str(val) in known
        if plain_size and known[str(val)] is not node:
            node.replace_all_uses_with(known[str(val)])
            if node.op == "placeholder" or not node.users:
                graph.erase_node(node)


def _keeps_value(node: fx.Node) -> bool:
    """Whether a node has the value of its first operand, whose memory it need not leave alone."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    val, have = node.meta.get("val"), source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(have, torch.Tensor):
        return False
    if node.target is aten._to_copy.default:
        return val.dtype == have.dtype
    if node.target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        nothing = 0 if node.target is aten.add.Tensor else 1
        other = node.args[1]
        plain = isinstance(other, (int, float)) and other == nothing
        return plain and val.dtype == have.dtype
    if node.target in (aten.expand.default, aten.reshape.default, aten.slice.Tensor):
        step = node.args[4] if node.target is aten.slice.Tensor and len(node.args) > 4 else 1
        return bool(step == 1) and [str(e) for e in val.shape] == [str(e) for e in have.shape]
    return False


InputOrigin = str | RankWeight | torch.Tensor | None
"""What a placeholder stands for: an input by its name, a parameter, a constant; a size is None."""


@dataclass(frozen=True)
class NamePlaceholders(Pass):
    """See the module's text. origins: of each placeholder, in order."""

    origins: Sequence[InputOrigin]

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite `gm.graph` in place. Raises ExportError for what it holds besides tensors."""
        weights, constants = 0, 0
        given = list(gm.graph.find_nodes(op="placeholder"))
        for node, origin in zip(given, self.origins, strict=True):
            if isinstance(origin, str):
                node.target, node.meta[ROLE] = origin, "input"
            elif isinstance(origin, RankWeight):
                node.target, node.meta[WEIGHT] = f"weight_{weights}", origin
                weights += 1
            elif origin is not None:
                node.target, node.meta[HELD] = f"constant_{constants}", origin
                constants += 1
            else:
                node.target = f"size_{node.name}"  # inputs tell it, and `tidy` drops it
            report.hits += 1
        last = given[-1]
        for node in gm.graph.find_nodes(op="get_attr"):
            value = getattr(gm, str(node.target))
            if not isinstance(value, torch.Tensor):
                raise export_error(f"is a {type(value).__name__}, not a tensor", node)
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"constant_{constants}")
            last.meta = {**node.meta, HELD: value.detach().cpu()}
            replace(node, last)
            constants += 1
            report.hits += 1


def read_origins(
    nodes: Sequence[fx.Node],
    inputs: Sequence[compat.GraphInput],
    names: Mapping[int, str],
    arguments: Collection[int],
    values: Mapping[int, torch.Tensor],
    stored: Mapping[fx.Node, State],
) -> tuple[list[InputOrigin], dict[str, str]]:
    """What the placeholders `nodes` of a planned graph stand for, and the name of each symbol;
    `inputs` are Dynamo's.

    By the id of a tensor: names of the parameters; arguments, those of the call; values, the
    user's tensor where the traced one is a copy without memory. stored: of each parameter.
    """
    origins: list[InputOrigin] = []
    sizes: dict[str, str] = {}
    for node, item in zip(nodes, inputs, strict=True):
        origin: InputOrigin = None
        if isinstance(item.real, nn.Parameter):
            val, name = node.meta["val"], names.get(id(item.real), item.name)
            origin = RankWeight(name, tuple(val.shape), stored[node], val.dtype)
        elif item.real is not None and id(item.real) not in arguments:
            value = values.get(id(item.real), item.real)
            origin = value.detach().to("cpu", item.real.dtype)
        elif item.real is not None:
            origin = item.key
            for dim, extent in zip(DIMS, item.fake.shape):
                if not isinstance(extent, int):
                    sizes.setdefault(str(extent), dim)
        origins.append(origin)
    return origins, sizes
