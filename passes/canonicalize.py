"""canonicalize: one spelling for each operation, so that sharding rules need not know the others.

    before                                                 after
    %x: f32[4,8]                                           %x: f32[4,8]
    %0: f32[32] = view(%x, [32])                           %0: f32[8,4] = reshape(%x, [8, 4])
    %1: f32[8,4] = _unsafe_view(%0, [8, 4])                %1: f32[8,4] = relu(%0)
    %2: f32[8,4] = slice(%1, 0, 0, 9223372036854775807)
    _assert_tensor_metadata(%2, None, None, torch.float32)
    %3: f32[8,4] = alias(%2)
    %4: f32[8,4] = relu(%3)

- view, _unsafe_view and reshape become reshape: which of them a trace has depends on the strides
  of the kernels that were traced, which need not be those of the shards. A reshape of a reshape
  nobody else reads becomes one.
- What changes nothing goes: assertions of metadata, whole-range slices, expansions to the same
  shape, aliases, copies of what dropout gives, detach of what has no gradient.
- Copies go where nobody can tell: not where the memory of the copy reaches an output, not of a
  buffer or an input in training (a queue that is written before the backward, MoCo's), and nowhere
  in a graph with an operator that depends on strides.
- What as_strided reads or writes is a copy whose memory is arranged as it was in the trace, before
  anything else is rewritten (lib/layouts.py).
- repeat_interleave loses `output_size`, which says what its other arguments say, of the whole.
- embedding and embedding_bag lose `sparse`: the gradient of a stored parameter is dense, and the
  kernels of compilers know no other.
- A part written into a complex tensor (slice_scatter, select_scatter) becomes cat of what is kept
  and what is written, with a step that of its real form: torch differentiates real ones only.
- new_empty and empty_like become new_zeros and zeros_like: nobody may rely on what memory held.
- cat with legacy empty operands (the first step of a Hugging Face cache) becomes cat of the rest.

Not done: an identity that the graph returns directly stays, because the caller may rely on its
being another tensor; assertions about values stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoshard.passes.base import Context, Pass, Report, maker, replace
from autoshard.passes.lib.layouts import arrange, reads_strides
from autoshard.planning import arguments, same_shape
from autoshard.runtime.graph_meta import DIFF, WITHOUT_GRADIENTS

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_COPIES = (aten.clone.default, aten.lift_fresh_copy.default, aten._to_copy.default)
_ALIASES = (aten.alias.default, aten.lift_fresh.default)
# Views that are the identity where they keep the shape.
_SAME_SHAPE = (
    aten.slice.Tensor,
    aten.expand.default,
    aten.expand_as.default,
    aten.view_as.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.narrow.default,
)
_LOOKUPS = (
    aten.embedding.default,
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten._embedding_bag.default,
)


@dataclass(frozen=True)
class Canonicalize(Pass):
    """See the module's text."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        arrange(graph, ctx.axis.size, report, self.name)
        escaping = _escaping(graph)
        given = set() if gm.meta.get(WITHOUT_GRADIENTS) else _given(graph)
        strides = next((node for node in graph.nodes if reads_strides(node)), None)
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is aten._assert_tensor_metadata.default:
                graph.erase_node(node)
                report.hits += 1
            elif node.target in _COPIES and _is_plain_copy(node):
                self._copy(node, escaping, given, strides, report)
            elif (same := _identity(node)) is not None:
                if strides is not None and node.meta["val"].stride() != same.meta["val"].stride():
                    report.skip(node, f"{strides.name} depends on strides")
                else:
                    self._drop(graph, node, same, report)
            elif respell := _RESPELLED.get(node.target):
                report.hits += respell(node)
        graph.eliminate_dead_code()

    @staticmethod
    def _drop(graph: fx.Graph, node: fx.Node, same: fx.Node, report: Report) -> None:
        if graph.output_node() in node.users:
            if node.target in _RESHAPES:
                report.hits += _reshape(node)
            report.skip(node, "the graph returns it")
            return
        replace(node, same)
        report.hits += 1

    @staticmethod
    def _copy(
        node: fx.Node,
        escaping: set[fx.Node],
        given: set[fx.Node],
        strides: fx.Node | None,
        report: Report,
    ) -> None:
        if node in escaping:
            report.skip(node, "its memory reaches an output")
        elif (
            node.target is aten.clone.default
            and node.kwargs.get("memory_format") is not torch.contiguous_format  # a reshape's own
            and node.args[0] in given
        ):
            report.skip(node, "its input may be written before the backward that reads it")
        elif strides is not None:
            report.skip(node, f"{strides.name} depends on strides")
        else:
            replace(node, node.all_input_nodes[0])
            report.hits += 1


def _filled(node: fx.Node) -> bool:
    like = node.target is aten.empty_like.default
    node.target = aten.zeros_like.default if like else aten.new_zeros.default
    return True


def _unsaid(node: fx.Node) -> bool:
    before = (node.args, node.kwargs)
    node.args = node.args[:3]
    node.kwargs = {name: said for name, said in node.kwargs.items() if name != "output_size"}
    return (node.args, node.kwargs) != before


def _dense(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload)
    at = [argument.name for argument in node.target._schema.arguments].index("sparse")
    if len(node.args) > at and node.args[at]:
        node.update_arg(at, False)
    elif node.kwargs.get("sparse"):
        node.update_kwarg("sparse", False)
    else:
        return False
    return True


def _identity(node: fx.Node) -> fx.Node | None:
    """The operand whose value the node has, if it does nothing."""
    if not node.all_input_nodes or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    val, have = node.meta.get("val"), source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(have, torch.Tensor):
        return None
    if node.target in _ALIASES:
        return source
    if node.target is aten.detach.default:
        return None if source.meta.get(DIFF) else source
    if node.target is aten.clone.default and source.target is aten.dropout.default:
        return source
    if node.target in _RESHAPES or node.target in _SAME_SHAPE:
        return source if same_shape(val, have) and _step(node) == 1 else None
    if node.target is aten.transpose.int:
        ndim = max(val.dim(), 1)
        dims: Any = node.args[1:]
        return source if dims[0] % ndim == dims[1] % ndim else None
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return source if all(d % len(order) == i for i, d in enumerate(order)) else None
    if node.target is aten.slice_scatter.default:
        written = node.args[1]
        if isinstance(written, fx.Node) and _step(node) == 1:
            new = written.meta["val"]
            return written if same_shape(new, val) and new.dtype == val.dtype else None
    return None


def _step(node: fx.Node) -> Any:
    """The step of a slice or slice_scatter; 1 for anything else."""
    return arguments(node).get("step", 1)


def _is_plain_copy(node: fx.Node) -> bool:
    """Whether a copy changes neither type nor device nor asks for a layout of its own."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    val, have = node.meta["val"], source.meta["val"]
    layout = node.kwargs.get("memory_format")
    return (val.dtype, val.device, val.layout) == (have.dtype, have.device, have.layout) and (
        layout in (None, torch.contiguous_format, torch.preserve_format)
    )


def _escaping(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory an output may share."""
    escaping = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in escaping and _shares_memory(node):
            escaping.update(node.all_input_nodes)
    return escaping


def _given(graph: fx.Graph) -> set[fx.Node]:
    """Buffers, inputs and views of them: values without a gradient that the caller may write."""
    given: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            kept = not node.meta.get(DIFF)
        else:
            kept = _shares_memory(node) and not given.isdisjoint(node.all_input_nodes[:1])
        if kept:
            given.add(node)
    return given


def _shares_memory(node: fx.Node) -> bool:
    if node.target is operator.getitem or node.target in _RESHAPES or _identity(node) is not None:
        return True
    return isinstance(node.target, OpOverload) and any(
        result.alias_info is not None for result in node.target._schema.returns
    )


def _reshape(node: fx.Node) -> bool:
    """Spell a view as reshape, joined with a reshape only it reads; whether that changed it."""
    changed = node.target is not aten.reshape.default
    node.target = aten.reshape.default
    source = node.args[0]
    while (
        isinstance(source, fx.Node)
        and source.target is aten.reshape.default
        and len(source.users) == 1
    ):
        node.replace_input_with(source, source.all_input_nodes[0])
        source = node.args[0]
        changed = True
    return changed


def _part_written(node: fx.Node) -> bool:
    """Spell a write of a part of a complex tensor as cat, where the part's bounds are numbers; with
    a step as a write of its real form."""
    named = arguments(node)
    target, part, dim = named["self"], named["src"], named["dim"]
    val, written = target.meta["val"], part.meta["val"]
    size = val.shape[dim]
    sliced = node.target is aten.slice_scatter.default
    given = [named[name] for name in (("start", "end") if sliced else ("index",))]
    numbers = all(n is None or isinstance(n, int) for n in (size, *given))
    if not val.is_complex() or written.dtype != val.dtype or not numbers:
        return False
    made = maker(node, Canonicalize.name)
    if _step(node) != 1:
        with node.graph.inserting_before(node):
            real = [made(aten.view_as_real.default, each) for each in (target, part)]
            whole = made(aten.slice_scatter.default, *real, dim % val.dim(), *given, _step(node))
            replace(node, made(aten.view_as_complex.default, whole))
        return True
    start, end, *_ = slice(*given[:2] if sliced else (given[0], given[0] + 1 or None)).indices(size)
    end = max(start, end)
    with node.graph.inserting_before(node):
        parts = [part if sliced else made(aten.unsqueeze.default, part, dim)]
        if start:
            parts.insert(0, made(aten.slice.Tensor, target, dim, 0, start))
        if end < size:
            parts.append(made(aten.slice.Tensor, target, dim, end, size))
        replace(node, made(aten.cat.default, parts, dim))
    return True


def _is_nothing(val: torch.Tensor) -> bool:
    """Whether it is of shape [0]; a size that is counted when the graph runs is not asked."""
    return val.dim() == 1 and isinstance(val.shape[0], int) and val.shape[0] == 0


def _cat(node: fx.Node) -> bool:
    """Drop operands of shape [0], which cat accepts beside any other shape."""
    parts: Any = node.args[0]
    full = [part for part in parts if not _is_nothing(part.meta["val"])]
    if not full or len(full) == len(parts):
        return False
    if any(part.meta["val"].dtype != node.meta["val"].dtype for part in full):
        return False
    if len(full) > 1:
        node.args = (full, *node.args[1:])
        return True
    make = maker(node, Canonicalize.name)
    with node.graph.inserting_before(node):
        replace(node, make(aten.clone.default, full[0], memory_format=torch.contiguous_format))
    return True


_RESPELLED: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys((aten.new_empty.default, aten.empty_like.default), _filled),
    aten.cat.default: _cat,
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default), _part_written),
    **dict.fromkeys(_LOOKUPS, _dense),
    aten.repeat_interleave.self_int: _unsaid,
}
"""By operator, what gives it its one spelling, and says whether it had another."""
