"""split_recurrent: dropout between the layers of an LSTM, GRU or RNN becomes operators of its own.

    before                                         after
    %x: f32[5,2,8]                                 %x: f32[5,2,8]
    %w: f32[32,8] ...                              %w: f32[32,8] ...
    %0 = gru(%x, %h, [...], True, 2, 0.5, True)    %0 = gru(%x, %h[0:1], [...], True, 1, 0.0, True)
                                                   %1: f32[5,2,8] = dropout(%0[0], 0.5, True)
                                                   %2 = gru(%1, %h[1:2], [...], True, 1, 0.0, True)
                                                   %3: f32[2,2,8] = cat([%0[1], %2[1]])

What follows can then give those dropouts the numbers of any other.

Not done: packed sequences (the `.data` overloads) and LSTMs with projections.
"""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, replace

aten = torch.ops.aten
_LAYERED = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


@dataclass(frozen=True)
class SplitRecurrent(Pass):
    """See the module's text."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        for node in list(gm.graph.nodes):
            if node.target not in _LAYERED:
                continue
            x, hx, weights, biases, layers, p, train, both, batch_first = node.args
            if layers == 1 or not train or p == 0:
                continue
            states = list(hx) if node.target is aten.lstm.input else [hx]
            each = len(weights) // layers
            directions = 2 if both else 1
            if each != directions * (4 if biases else 2):
                report.skip(node, f"{len(weights)} weights of {layers} layers: it has projections")
                continue
            call = maker(node, self.name)
            ends: list[list[fx.Node]] = []  # the states that each layer ends with
            with gm.graph.inserting_before(node):
                for i in range(layers):
                    if i:
                        x = call(aten.dropout.default, x, p, True)
                    rows = i * directions, (i + 1) * directions
                    hx = [call(aten.slice.Tensor, state, 0, *rows) for state in states]
                    own = weights[i * each : (i + 1) * each]
                    begin = hx if len(hx) > 1 else hx[0]
                    options = (biases, 1, 0.0, True, both, batch_first)
                    layer = call(node.target, x, begin, own, *options)
                    x, *after = [call(operator.getitem, layer, k) for k in range(1 + len(states))]
                    ends.append(after)
                whole = [x, *(call(aten.cat.default, list(parts)) for parts in zip(*ends))]
            for user in list(node.users):
                assert user.target is operator.getitem
                replace(user, whole[user.args[1]])
            gm.graph.erase_node(node)
            report.hits += 1
