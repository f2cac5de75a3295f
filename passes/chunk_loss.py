"""chunk_loss: logits and their cross entropy become one operator that goes by chunks of rows.

    before                                        after
    %x: f32[2,6,8]                                %x: f32[2,6,8]
    %w: f32[4,8]                                  %w: f32[4,8]
    %y: i64[12]                                   %y: i64[12]
    %0: f32[2,6,4] = linear(%x, %w)               %0: f32[] = chunked_cross_entropy(%x, %w, None,
    %1: f32[12,4] = reshape(%0, [-1, 4])              %y)
    %2: f32[] = cross_entropy_loss(%1, %y)

Runs on the local graph, after all that changes losses. The logits of a rank, their copies and their
gradient, which are the largest values of most models, are then never whole. Between the product and
the loss there may be casts, a softcap, scales, a cut of a padded vocabulary, views and cut rows.

Not done: logits that something else reads (a returned copy aside), losses of each token
(reduction="none"), logits that the plan gathers or splits anew; other functions of logits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Report, emit, user_line
from autoshard.planning import tensor_bytes
from autoshard.runtime import operators
from autoshard.runtime.chunked_loss import (
    RowFunction,
    as_text,
    chunked_cross_entropy,
    rows_a_chunk,
)
from autoshard.runtime.collectives import I, chunk_size, redistribute
from autoshard.runtime.graph_meta import (
    CHUNKED,
    DIFF,
    N_OUTPUTS,
    OUTPUT_STATES,
    WITHHELD,
    WITHOUT_GRADIENTS,
)

aten = torch.ops.aten
_LARGE = 1 << 30  # bytes of logits: fewer are seldom what a step's peak is made of
_WHOLE = aten.cross_entropy_loss.default
_OVER_TOKENS = (operators.loss_over_tokens, operators.loss_over_tokens_and_classes)
_NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_DEFAULTS = (None, None, None, operators.MEAN, -100, 0.0)
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_SAME = (aten.clone.default, aten.contiguous.default, aten.alias.default)
_COPIES = (*_SAME, aten._to_copy.default)
_BY_NUMBER = {
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
}


class LossFound(NamedTuple):
    """A cross entropy: by chunks of so many rows, or whole, and why. bytes: of a rank's logits."""

    rows: int
    bytes: int
    reason: str
    where: str


class _Left(Exception):
    """Why a loss stays as it is."""


@dataclass
class _Head:
    """The operators between hidden states and a loss.

    chain: from the scores up to the product, which is the last. functions: of each row, in their
    order. cuts: slices of rows, the last first. copies: of logits, which the model returns and
    nothing else reads; accelerate casts all outputs under autocast.
    """

    chain: list[fx.Node] = field(default_factory=list)
    copies: list[fx.Node] = field(default_factory=list)
    functions: list[RowFunction] = field(default_factory=list)
    cuts: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class ChunkLoss:
    """at_least: bytes of a rank's logits, below which a loss stays. withhold: whether logits that
    are results of a graph with gradients are no results any more."""

    name: ClassVar[str] = "chunk_loss"
    optional: ClassVar[bool] = True
    at_least: int = 0
    withhold: bool = False

    @staticmethod
    def asked(option: bool | str) -> list[ChunkLoss]:
        """The pass that the option `chunk_loss` asks for, if any."""
        if option == "auto":
            return [ChunkLoss(at_least=_LARGE)]
        return [ChunkLoss(withhold=True)] if option else []

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite `gm.graph` in place."""
        report, found = Report(self.name), Counter[LossFound]()
        for node in [n for n in gm.graph.nodes if _is_loss(n)]:
            nbytes, rows, reason = tensor_bytes(node.args[0].meta["val"]), 0, ""
            try:
                rows = self._chunk(gm, node, nbytes)
                report.hits += 1
            except _Left as left:
                reason = str(left)
                report.skip(node, reason)
            found[LossFound(rows, nbytes, reason, user_line(node))] += 1
        gm.meta[CHUNKED] = found
        return report

    def _chunk(self, gm: fx.GraphModule, node: fx.Node, nbytes: int) -> int:
        """Replace a loss, and say how many rows a chunk has."""
        if nbytes < self.at_least:
            raise _Left(f"its logits are {nbytes:,} bytes a rank, less than {self.at_least:,}")
        given: dict[str, Any] = {
            **dict(zip(_NAMES, _DEFAULTS)),
            **dict(zip(_NAMES, node.args)),
            **node.kwargs,
        }
        if given["reduction"] == operators.NONE:
            raise _Left("it is a loss of each token")
        if given["target"].meta["val"].is_floating_point():
            raise _Left("its targets are probabilities")
        head = _head_of(node)
        returned = self._returned(gm, head, node)
        val = given["self"].meta["val"]
        classes, axis = given.get("classes"), given.get("axis")
        over = [given[name] for name in ("axis", "outer") if name in given]
        if classes is None:
            classes, axis = val.shape[1], None
        else:
            over = over[1:]
        options = {
            "functions": as_text(head.functions),
            "dtype": val.dtype,
            "classes": classes,
            **({"axis": axis} if axis is not None else {}),
            **({"over": tuple(over)} if over else {}),
        }
        with gm.graph.inserting_before(node):
            hidden, weight, bias = self._operands(gm.graph, head)
            args = (hidden, weight, bias, *(given[name] for name in _NAMES[1:]))
            new = emit(
                gm.graph,
                node,
                chunked_cross_entropy,
                args,
                options,
                provenance=self.name,
                value=node,
            )
        node.replace_all_uses_with(new)
        _withhold(gm, returned)
        for one in (node, *head.copies, *head.chain):
            gm.graph.erase_node(one)
        rows = nbytes // (val.shape[1] * val.dtype.itemsize)  # whose number may be a symbol
        most = chunk_size(classes, 1 if axis is None else axis.size)
        return rows_a_chunk(rows, most, hidden.meta["val"].shape[-1])

    def _operands(self, graph: fx.Graph, head: _Head) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Hidden states of the rows that count, weight [classes, width] and bias."""
        product = head.chain[-1]
        operands = _operands(product)
        assert operands is not None
        hidden, weight, bias = operands
        for cut in reversed(head.cuts):
            given = (hidden, *cut.args[1:])
            hidden = emit(graph, cut, aten.slice.Tensor, given, provenance=self.name)
        if product.target is not aten.linear.default:
            turned = aten.t.default
            weight = emit(graph, product, turned, (weight,), provenance=self.name, value="unknown")
        return hidden, weight, bias

    def _returned(self, gm: fx.GraphModule, head: _Head, node: fx.Node) -> list[int]:
        """The results that are logits; raises where they, or another reader, need them whole."""
        output = gm.graph.output_node()
        for user in dict.fromkeys(user for one in head.chain for user in one.users):
            if user in (*head.chain, node, output):
                continue
            if user.target not in _COPIES or set(user.users) != {output}:
                raise _Left(f"{user.name} reads its logits too")
            head.copies.append(user)
        results: Any = output.args[0]
        returned = [i for i, one in enumerate(results) if one in (*head.chain, *head.copies)]
        if not returned:
            return []
        if not node.meta.get(DIFF) or gm.meta.get(WITHOUT_GRADIENTS):
            raise _Left("the model returns its logits, and no gradient is asked for")
        if not self.withhold:
            raise _Left("the model returns its logits, which chunk_loss=True withholds in training")
        if any(not isinstance(n, int) for i in returned for n in results[i].meta["val"].shape):
            raise _Left("the model returns its logits, of sizes that are known at run time only")
        if max(returned) >= gm.meta[N_OUTPUTS]:
            raise _Left("its logits are written to an input")
        return returned


def _withhold(gm: fx.GraphModule, positions: list[int]) -> None:
    if not positions:
        return
    output = gm.graph.output_node()
    results, states = list(output.args[0]), list(gm.meta[OUTPUT_STATES])  # type: ignore[arg-type]
    for i in positions:
        results[i], states[i] = None, I
    output.args = (tuple(results),)
    gm.meta[OUTPUT_STATES] = states
    gm.meta[WITHHELD] = (*gm.meta.get(WITHHELD, ()), *positions)


def _is_loss(node: fx.Node) -> bool:
    if node.target in (_WHOLE, operators.vocab_parallel_cross_entropy):
        return True
    return node.target in _OVER_TOKENS and node.kwargs["op"] is _WHOLE


def _head_of(node: fx.Node) -> _Head:
    """What is between a loss and the product that makes its logits."""
    head = _Head()
    at: Any = node.args[0]
    dims = at.meta["val"].dim()
    if dims < 2:
        raise _Left("it is of one token")
    if dims > 2:  # classes are the second dim of a loss' scores
        if dims > 3 or at.target is not aten.transpose.int:
            raise _Left("the classes of its scores are not their last dim")
        if {dim % 3 for dim in at.args[1:]} != {1, 2}:
            raise _Left("the classes of its scores are not their last dim")
        head.chain.append(at)
        at = at.args[0]
    while _operands(at) is None:
        source = at.args[0] if at.args else None
        if not isinstance(source, fx.Node):
            raise _Left("its logits are made by no product with a weight")
        before, after = source.meta["val"].shape, at.meta["val"].shape
        function = _function(at, source)
        if function is not None:
            head.functions.insert(0, function)
        elif at.target in _VIEWS and before[-1] == after[-1] and not head.cuts:
            pass  # the rows keep their order
        elif at.target is aten.slice.Tensor and before[-1] == after[-1]:
            head.cuts.append(at)
        elif at.target is redistribute:
            raise _Left("the plan sends its logits, or splits them anew")
        elif at.target not in _SAME:
            what = getattr(at.target, "__name__", at.target)
            raise _Left(f"{at.name} ({what}) is between its logits and it")
        head.chain.append(at)
        at = source
    head.chain.append(at)
    return head


def _function(node: fx.Node, source: fx.Node) -> RowFunction | None:
    """The function of each row that a node is, if it is one that the operator knows."""
    before, after = source.meta["val"], node.meta["val"]
    if node.target is aten._to_copy.default:
        cast = set(node.kwargs) <= {"dtype", "device"} and before.device == after.device
        return ("to", str(after.dtype).removeprefix("torch.")) if cast else None
    if node.target is aten.tanh.default:
        return ("tanh",)
    if name := _BY_NUMBER.get(node.target):  # type: ignore[call-overload]
        number = node.args[1] if len(node.args) == 2 else None
        known = type(number) in (int, float) and not node.kwargs and before.dtype == after.dtype
        return (name, number) if known else None
    dim, start, step = (
        node.args[i] if len(node.args) > i else default for i, default in ((1, 0), (2, 0), (4, 1))
    )
    if node.target is aten.slice.Tensor and dim in (-1, before.dim() - 1) and step == 1:
        sizes = (start, start + after.shape[-1], before.shape[-1])  # type: ignore[operator]
        if all(type(size) is int and size >= 0 for size in sizes):
            return ("cut", *sizes)
    return None


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Hidden states, weight and bias of a product."""
    args: Any = (*node.args, None)
    if node.target is aten.linear.default and not node.kwargs:
        return args[0], args[1], args[2]
    if node.target is aten.mm.default:
        return args[0], args[1], None
    if node.target is aten.addmm.default and not node.kwargs:
        return args[1], args[2], args[0]
    return None
