"""The MLPs of a decoder that have no experts: activation, gate, which projection is which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors
from autoshard.export.decoder.probing import activation, evaluate, gated_activation, sources
from autoshard.export.decoder.structure import Linear, Mlp
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph


@dataclass(frozen=True)
class LayerMlp:
    """An MLP and where the graph has it. readers: the projections that read the layer's norm.
    down: the node whose result is added. routed: with experts, all of its anchors that the stream
    reads, in the place of `down` alone."""

    mlp: Mlp
    readers: tuple[Linear, ...]
    down: fx.Node
    routed: tuple[fx.Node, ...] = ()


def read_mlps(graph: ModelGraph, found: Anchors, role: dict[fx.Node, str]) -> list[LayerMlp]:
    """The MLPs in order of their down-projections; their projections get a role."""
    mlps = []
    for down, feeds in downs(found, role):
        mlp = read_mlp(graph, found, down, feeds)
        readers = tuple(found.linear[node] for node in feeds)
        mlps.append(LayerMlp(mlp, readers, down))
        role.update(dict.fromkeys(feeds, "up"))
        role[down] = "down"
    return mlps


def downs(found: Anchors, role: dict[fx.Node, str]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """(projection, those it reads) of each that reads projections only, none with a role."""
    anchors, result = found.all(), []
    for node, x in found.inputs.items():
        feeds = sources(x, anchors)
        if node not in role and all(n in found.linear and n not in role for n in feeds):
            result.append((node, feeds))
    return result


def read_mlp(graph: ModelGraph, found: Anchors, down: fx.Node, feeds: list[fx.Node]) -> Mlp:
    """The MLP whose down-projection reads `feeds`: up, or gate and up, apart or as one."""
    linear, x = found.linear, found.inputs[down]
    width = linear[down].inputs

    def between(*values: Tensor) -> Tensor:
        # the same values in the first columns of every row
        given = {}
        for node, value in zip(feeds, values):
            full = torch.zeros(node.meta["val"].shape, dtype=torch.float64)
            wide = value.repeat(full.shape[-1] // len(value) + 1)[: full.shape[-1]]
            given[node] = full + wide
        result = evaluate(graph, x, given)
        return result.reshape(-1, result.shape[-1])[0]

    def halves(*values: Tensor) -> Tensor:
        padded = [torch.nn.functional.pad(value, (0, width - len(value))) for value in values]
        return between(torch.cat(padded))

    first = linear[feeds[0]]
    if len(feeds) == 1 and first.outputs == width:
        name = activation(_cut(between, width))
        if name is not None:
            return Mlp(up=first, gate=None, down=linear[down], activation=name)
    elif len(feeds) == 1 and first.outputs == 2 * width:
        gated = gated_activation(_cut(halves, width))
        if gated is not None:
            return replace(halved(first, gated[1], linear[down]), activation=gated[0])
    elif len(feeds) == 2 and first.outputs == linear[feeds[1]].outputs == width:
        gated = gated_activation(_cut(between, width))
        if gated is not None:
            name, index = gated
            up, gate = linear[feeds[1 - index]], linear[feeds[index]]
            return Mlp(up=up, gate=gate, down=linear[down], activation=name)
    raise export_error("its input is no activation, gated or not, that is known", down)


def halved(both: Linear, index: int, down: Linear) -> Mlp:
    """An MLP whose gate is half `index` of one projection, and up the other half."""
    half = torch.arange(down.inputs), torch.arange(down.inputs, 2 * down.inputs)
    gate, up = half[index], half[1 - index]
    return Mlp(up=replace(both, rows=up), gate=replace(both, rows=gate), down=down, activation="")


def _cut(between: Callable[..., Tensor], width: int) -> Callable[..., Tensor]:
    """Probe in as many pieces as fit the width: narrow test models have few columns."""

    def run(*values: Tensor) -> Tensor:
        length = len(values[0])
        pieces = []
        for start in range(0, length, width):
            part = [value[start : start + width] for value in values]
            pieces.append(between(*part)[: len(part[0])])
        return torch.cat(pieces)

    return run
