"""quantize_weights: weights that a rank holds as numbers of 8 or 4 bits and their scales.

    before                                  after
    %w: f16[256,512]                        %w: i8[256,512]      %w_scale: f16[256,1]
    %1: f16[b,s,256] = linear(%x, %w)       %0: f16[256,512] = dequantize(%w, %w_scale, [1, 512])
                                            %1: f16[b,s,256] = linear(%x, %0)

Experts, [experts, rows, columns], are the rows of all of them, and what is dequantized is reshaped.
A rank's parts of weights, quantized or not, are read here too, from one process or from a running
sharded job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from autoshard.export.quantization import BlockScaled, block_scaled
from autoshard.export.rank_graph.graph import QuantizedForm, RankGraph, RankWeight
from autoshard.export.rank_graph.operators import dequantize
from autoshard.export.serial_graph import WeightSource, whole
from autoshard.passes import Context, Pass, Report
from autoshard.runtime.collectives import Axis, chunk_bounds, shard_dim
from autoshard.runtime.graph_meta import WEIGHT

aten = torch.ops.aten


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """See the module's text. kind: the layout. rows: of the parameters that are quantized, by name,
    those of each published matrix."""

    kind: str
    rows: Mapping[str, int]

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        for node in graph.find_nodes(op="placeholder"):
            weight: RankWeight | None = node.meta.get(WEIGHT)
            if weight is None or weight.name not in self.rows:
                continue
            form = QuantizedForm(self.kind, self.rows[weight.name], f"{node.target}_scale")
            node.meta[WEIGHT] = weight = replace(weight, quantized=form)
            if node.users:
                _dequantized(graph, node, weight, ctx.axis)
                report.hits += 1


def _dequantized(graph: fx.Graph, node: fx.Node, weight: RankWeight, axis: Axis) -> None:
    """Have the users of a weight read what its numbers and scales stand for."""
    assert weight.quantized is not None
    val = node.meta["val"]
    empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    part = quantized_part(weight, axis, empty)
    with graph.inserting_after(node):
        scale = graph.placeholder(weight.quantized.scale)
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        result = new = graph.call_function(
            dequantize, (node, scale, list(part.block)), {"dtype": weight.dtype}
        )
        if val.dim() > 2:
            result = graph.call_function(aten.reshape.default, (new, list(val.shape)))
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not new)
    for one in (new, result):
        one.meta.update({k: v for k, v in node.meta.items() if k not in ("val", WEIGHT)})
    with val.fake_mode:
        node.meta["val"] = torch.empty(part.values.shape, dtype=part.values.dtype)
        scale.meta["val"] = torch.empty(part.scale.shape, dtype=part.scale.dtype)
        new.meta["val"] = torch.empty(part.values.shape, dtype=weight.dtype)
    result.meta["val"] = new.meta["val"] if result is new else val


def quantized_part(weight: RankWeight, axis: Axis, value: torch.Tensor) -> BlockScaled:
    """What a rank holds of a quantized weight, as a matrix. value: of the weight's shape, in its
    dtype; without memory, for what it will be."""
    assert weight.quantized is not None
    made = block_scaled(weight.quantized.kind, value, weight.quantized.rows)
    dim = shard_dim(weight.state)
    if dim is not None:
        made = made.part(dim, *chunk_bounds(value.shape[dim], axis))
    return made.matrix


def _needed(weight: RankWeight, axis: Axis, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each dim the first index that a rank needs and one past the last: all, where scales are
    of more than its part."""
    needed = whole(shape)
    dim = shard_dim(weight.state)
    if dim is not None and weight.quantized is None:
        start, length = chunk_bounds(shape[dim], axis)
        needed[dim] = (start, start + length)
    return needed


def read_weights(source: WeightSource, graph: RankGraph, turn: int = 0) -> dict[str, torch.Tensor]:
    """The weights of the rank that this process builds, by placeholder: `turn` + its own rank.

    graph: of any rank. Empty where the mesh has no such rank. Collective where the model stores
    shards: one parameter at a time, and a parameter is gathered only where what some process holds
    is not what it needs, or where it is quantized. A quantized one is its numbers, its scales by
    the placeholder of these.
    """
    ranks = range(turn, min(turn + source.job.size, graph.tp))
    mine = source.job.rank
    parts: dict[str, torch.Tensor] = {}
    for target, weight in sorted(graph.weights.items(), key=lambda item: item[1].name):
        axes = [graph.axis._replace(rank=rank) for rank in ranks]
        block = source.read(weight.name, [[partial(_needed, weight, axis)] for axis in axes])
        if mine >= len(axes):
            continue
        part, axis = block.tensor, axes[mine]
        for dim, (first, last) in enumerate(_needed(weight, axis, weight.shape)):
            part = part.narrow(dim, first - block.starts[dim], last - first)
        part = part.to("cpu", weight.dtype).contiguous()
        if weight.quantized is None:
            parts[target] = part
        else:
            held = quantized_part(weight, axis, part)
            parts[target], parts[weight.quantized.scale] = held.values, held.scale
    return parts
