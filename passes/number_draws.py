"""number_draws: the number of a random operator is a value, counted up from one to the next.

    before                                          after
    %0: i64[] = shared_seed(cpu, axis=tp)           %0: i64[] = shared_seed(cpu, axis=tp)
    %1: f32[4,8] = dropout(%x, %0, 0.5, 0)          %1: i64[] = bitwise_or(%0, -1)
    %2: f32[4,8] = relu(%1)                         %2: i64[] = add(%1, 1)
    %3: f32[4,8] = dropout(%2, %0, 0.5, 1)          %3: f32[4,8] = dropout(%x, %0, 0.5, %2)
                                                    %4: f32[4,8] = relu(%3)
                                                    %5: i64[] = add(%2, 1)
                                                    %6: f32[4,8] = dropout(%4, %0, 0.5, %5)

Layers that draw are then equal, and are traced and compiled once; with numbers in their text no two
are. The draws are the same. The first number is -1 whatever the seed: Inductor would fold what is
counted from a constant. Backward reads the numbers that forward kept: counted again, from the first
layer on, they would be in none of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, set_recomputed
from autoshard.planning import packet, value
from autoshard.runtime.randomness import DRAWING, Drawing, on_microbatch, on_shard

aten = torch.ops.aten
_OF_PARTS = (on_shard, on_microbatch)


@dataclass(frozen=True)
class NumberDraws(Pass, optional=True):
    """Runs on the local graph, or on that of a stage of a pipeline."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        number: Any = None
        before = -1
        for node in list(gm.graph.nodes):
            drawing = _drawing(node)
            if drawing is None:
                continue
            call: Any = node.args[drawing.call]
            make = maker(node, self.name)
            with gm.graph.inserting_before(node):
                if number is None:
                    seed: Any = node.args[drawing.seed]
                    one = make(aten.select.int, seed, 0, 0) if value(seed).dim() else seed
                    number = make(aten.bitwise_or.Scalar, one, before)
                number = make(aten.add.Tensor, number, call - before)
            set_recomputed(number, False)
            node.update_arg(drawing.call, number)
            if node.target not in _OF_PARTS:  # an operator takes an integer
                node.target = drawing.run
            before = call
            report.hits += 1


def _drawing(node: fx.Node) -> Drawing | None:
    """What draws, as an operator or as the function of one on a shard."""
    ours = getattr(node.target, "namespace", "") == "autoshard"
    name: Any = node.kwargs["op"] if node.target in _OF_PARTS else ours and packet(node).__name__
    return DRAWING.get(name)
