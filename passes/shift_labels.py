"""shift_labels: labels are shifted instead of logits, beside cp.

    before                                        after
    %x: f32[2,16,64]                              %x: f32[2,16,64]
    %y: i64[2,15]                                 %y: i64[2,15]
    %0: f32[2,15,64] = slice(%x, 1, 0, -1)        %0: f32[32,64] = reshape(%x, [32, 64])
    %1: f32[30,64] = reshape(%0, [-1, 64])        %1: i64[2,16] = constant_pad_nd(%y, [0, 1], -100)
    %2: i64[30] = reshape(%y, [-1])               %2: i64[32] = reshape(%1, [32])
    %3: f32[] = cross_entropy_loss(%1, %2)        %3: f32[] = cross_entropy_loss(%0, %2)

A model that predicts the next token and cuts the last row off its logits leaves one row fewer than
the axis divides: the logits, the largest value of most models, would be gathered. Rows whose label
is ignored add nothing to a sum, to a mean or to its count, nor to a gradient: so the labels get as
many ignored ones behind as the logits have rows more.

Not done: rows that are cut off in front; losses of each token (reduction="none"), whose result has
a shape; sizes that are known at run time only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker
from autoshard.planning import arguments, unflattened
from autoshard.runtime.operators import NONE

aten = torch.ops.aten
_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
_ALIKE = (aten._to_copy.default, aten.clone.default)  # row by row, of any number of rows


@dataclass(frozen=True)
class ShiftLabels(Pass, optional=True):
    """See the module's text."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        for node in [n for n in graph.nodes if n.target in _LOSSES]:
            path, target = _to_the_cut(node.args[0]), unflattened(node.args[1], 2)
            if path is None or target is None:
                continue
            *above, cut = path
            whole: fx.Node = cut.args[0]  # type: ignore[assignment]
            rows, tokens = cut.meta["val"].shape[:2], target.meta["val"].shape
            given = arguments(node)
            if given["reduction"] == NONE:
                report.skip(node, "it is a loss of each token")
                continue
            if tokens != rows:
                report.skip(node, "its scores and targets are of other tokens")
                continue
            more = whole.meta["val"].shape[1] - rows[1]
            make = maker(node, self.name)
            with graph.inserting_before(node):
                scores = whole
                for one in reversed(above):
                    scores = self._again(one, scores)
                padding = [0, more], given["ignore_index"]
                labels = make(aten.constant_pad_nd.default, target, *padding)
                labels = self._again(node.args[1], labels)  # type: ignore[arg-type]
            node.args = (scores, labels, *node.args[2:])
            report.hits += 1
        graph.eliminate_dead_code()

    def _again(self, old: fx.Node, source: fx.Node) -> fx.Node:
        """What `old` does, of a value with more rows."""
        args: tuple[Any, ...] = (source, *old.args[1:])
        if old.target is aten.reshape.default:
            shape = source.meta["val"].shape
            args = (source, [shape[0] * shape[1], *shape[2:]])
        target: Any = old.target
        return maker(old, self.name)(target, *args, **old.kwargs)


def _to_the_cut(scores: Any) -> list[fx.Node] | None:
    """The operators between a loss' scores and the rows that are cut off them, and that cut."""
    path: list[fx.Node] = []
    flat = False
    node = scores
    while isinstance(node, fx.Node) and node.op == "call_function":
        path.append(node)
        if node.target is aten.slice.Tensor:
            return path if flat and _cuts_the_end(node) else None
        if not flat and unflattened(node, 3) is not None:
            flat = True
        elif node.target not in _ALIKE:
            return None
        node = node.args[0]
    return None


def _cuts_the_end(node: fx.Node) -> bool:
    """Whether a slice leaves out the last rows, and no others, of each sequence."""
    given = arguments(node)
    before: Any = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    after = node.meta["val"].shape
    if not all(isinstance(size, int) for size in (*before, *after)):
        return False
    along = given["dim"] == 1 and given["start"] in (0, None) and given["step"] == 1
    return bool(along and after[1] < before[1])
