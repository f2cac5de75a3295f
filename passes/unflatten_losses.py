"""unflatten_losses: a loss of flattened tokens becomes the loss of their sequences, beside cp.

    before                                        after
    %x: f32[2,16,64]                              %x: f32[2,16,64]
    %y: i64[2,16]                                 %y: i64[2,16]
    %0: f32[32,64] = reshape(%x, [-1, 64])        %0: f32[2,64,16] = transpose(%x, 1, 2)
    %1: i64[32] = reshape(%y, [-1])               %1: f32[] = cross_entropy_loss(%0, %y)
    %2: f32[] = cross_entropy_loss(%0, %1)

Context parallelism splits each sequence, and the flattened tokens of several are no parts of
sequences: the logits, the largest value of most models, would be exchanged or gathered. A rank
flattens what it has of them (`runtime/operators/vocabulary.py`).

Not done: losses of each token (reduction="none"), whose result has the flattened shape.
"""

from dataclasses import dataclass

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker
from autoshard.planning import arguments, is_one, unflattened
from autoshard.runtime.operators import NONE

aten = torch.ops.aten
_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)


@dataclass(frozen=True)
class UnflattenLosses(Pass, optional=True):
    """See the module's text."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        for node in [n for n in graph.nodes if n.target in _LOSSES]:
            scores, target = unflattened(node.args[0], 3), unflattened(node.args[1], 2)
            if scores is None or target is None or is_one(scores.meta["val"].shape[0]):
                continue  # the tokens of one sequence are parts of it, flattened or not
            if scores.meta["val"].shape[:-1] != target.meta["val"].shape:
                report.skip(node, "its scores and targets are flattened from other shapes")
                continue
            if arguments(node)["reduction"] == NONE:
                report.skip(node, "it is a loss of each token")
                continue
            with graph.inserting_before(node):
                turned = maker(node, self.name)(aten.transpose.int, scores, 1, 2)
            node.args = (turned, target, *node.args[2:])
            report.hits += 1
        graph.eliminate_dead_code()
