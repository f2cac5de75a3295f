"""The MLPs of a decoder: activation, gate, which projection is which; and mixtures of experts,
stacks of matrices and the router that chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors
from autoshard.export.decoder.probing import activation, close, evaluate, gated_activation, sources
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


aten = torch.ops.aten


@dataclass(frozen=True)
class _Routed:
    """The anchors of one mixture: both stacks, and the router that `topk` reads."""

    first: fx.Node
    down: fx.Node
    router: fx.Node
    topk: fx.Node


def read_experts(graph: ModelGraph, found: Anchors, role: dict[fx.Node, str]) -> list[LayerMlp]:
    """The mixtures of experts, in order; their projections get a role. Empty where there are none.

    Each is two stacks of matrices, gate and up of all experts in one and down in the other, and
    may have an MLP of all tokens beside it. Raises ExportError where the chosen experts are not
    weighted by a softmax, or for another form.
    """
    stacks = [node for node in found.linear if _depth(graph, found, node) == 3]
    routers = [node for node in graph.nodes if node.target is aten.topk.default]
    if not stacks:
        return []
    anchors = found.all()
    lower = [n for n in stacks if any(m in stacks for m in sources(found.inputs[n], anchors))]
    if len(lower) * 2 != len(stacks) or len(lower) != len(routers):
        raise export_error(
            f"{len(stacks)} stacks of expert matrices, {len(lower)} of them down-projections, and "
            f"{len(routers)} routers; a layer has 2, 1 and 1",
            stacks[0],
        )
    mixtures = []
    for down, topk in zip(lower, routers):
        (first,) = [n for n in sources(found.inputs[down], anchors) if n in stacks]
        (router,) = [n for n in sources(topk.args[0], anchors) if n in found.linear]  # type: ignore[arg-type]
        role.update({down: "down", first: "up", router: "router"})
        mixtures.append(_Routed(first, down, router, topk))
    shared = read_mlps(graph, found, role)  # of all tokens
    if shared and len(shared) != len(mixtures):
        raise export_error(
            f"{len(mixtures)} mixtures of experts and {len(shared)} MLPs beside them; all layers "
            "or none have one",
            shared[0].down,
        )
    return [
        _read(graph, found, role, one, shared[i] if shared else None)
        for i, one in enumerate(mixtures)
    ]


def _read(
    graph: ModelGraph,
    found: Anchors,
    role: dict[fx.Node, str],
    one: _Routed,
    shared: LayerMlp | None,
) -> LayerMlp:
    router, down = found.linear[one.router], found.linear[one.down]
    both, width = found.linear[one.first], down.inputs
    if both.outputs != 2 * width:
        raise export_error(
            f"{both.outputs} outputs are not gate and up of a down-projection of {width} inputs",
            one.first,
        )
    gated = gated_activation(lambda a, b: _between(graph, found, one, a, b))
    if gated is None:
        raise export_error(
            "the experts are not act(gate) * up with gate and up in halves", down.node
        )
    top_k = int(one.topk.args[1])  # type: ignore[arg-type]
    gate = None if shared is None else _shared_gate(found, role, one, shared)
    mlp = replace(
        halved(both, gated[1], down),
        activation=gated[0],
        router=router,
        experts=router.outputs,
        top_k=top_k,
        renormalised=_renormalised(graph, found, one, top_k, shared, gate),
        shared=None if shared is None else shared.mlp,
        shared_gate=None if gate is None else found.linear[gate],
    )
    readers, routed = [router], [one.down, one.router]
    if shared is not None:
        readers += shared.readers
        routed.append(shared.down)
    if gate is not None:
        readers.append(found.linear[gate])
        routed.append(gate)
    return LayerMlp(mlp, tuple(readers), one.down, tuple(routed))


def _between(graph: ModelGraph, found: Anchors, one: _Routed, a: Tensor, b: Tensor) -> Tensor:
    """What the down-projection reads where the halves of the first stack result in a and b."""
    width = found.linear[one.down].inputs
    pieces = []
    for start in range(0, len(a), width):
        part = a[start : start + width], b[start : start + width]
        full = torch.zeros(one.first.meta["val"].shape, dtype=torch.float64)
        full[..., : len(part[0])] = part[0]
        full[..., width : width + len(part[1])] = part[1]
        result = evaluate(graph, found.inputs[one.down], {one.first: full})
        pieces.append(result[0, : len(part[0])])
    return torch.cat(pieces)


def _shared_gate(
    found: Anchors, role: dict[fx.Node, str], one: _Routed, shared: LayerMlp
) -> fx.Node | None:
    """The projection to one number that stands between the shared MLP's input and its result."""
    (norm,) = sources(found.inputs[one.router], found.all())
    for node, x in found.inputs.items():
        single = found.linear[node].outputs == 1 and node not in role
        if single and sources(x, found.all()) == [norm]:
            role[node] = "router"
            return node
    return None


def _renormalised(
    graph: ModelGraph,
    found: Anchors,
    one: _Routed,
    top_k: int,
    shared: LayerMlp | None,
    gate: fx.Node | None,
) -> bool:
    """Whether the weights of the chosen experts sum to 1; else they are those of the softmax.

    Told by values: all tokens have the same logits, the chosen experts result in 1, 2, ...
    """
    tokens = one.router.meta["val"].numel() // found.linear[one.router].outputs
    logits = torch.linspace(-1, 2, found.linear[one.router].outputs, dtype=torch.float64)
    logits = logits.roll(1)
    weights = logits.softmax(0)
    chosen = weights.topk(top_k).indices.sort().values
    rows = one.down.meta["val"]
    if rows.dim() == 2 and rows.shape[0] == tokens * top_k:
        value = torch.arange(1, top_k + 1).repeat_interleave(tokens).unsqueeze(1)
    elif rows.dim() == 3 and rows.shape[0] == len(logits):
        value = torch.zeros(len(logits), 1, 1, dtype=torch.long)
        value[chosen, 0, 0] = torch.arange(1, top_k + 1)
    else:
        raise export_error(f"a stack of experts results in {tuple(rows.shape)}", one.down)
    given: dict[fx.Node, Tensor] = {
        one.router: logits.expand(one.router.meta["val"].shape),
        one.down: value.double().expand(rows.shape),
    }
    if shared is not None:
        given[shared.down] = torch.full(shared.down.meta["val"].shape, 10.0, dtype=torch.float64)
    if gate is not None:
        given[gate] = torch.full(gate.meta["val"].shape, 0.7, dtype=torch.float64)
    beside = 0.0 if shared is None else 10.0
    beside *= torch.tensor(0.7, dtype=torch.float64).sigmoid().item() if gate is not None else 1.0
    result = _sum(graph, found, given, one).flatten()
    order = torch.arange(1, top_k + 1)
    plain = (weights[chosen] * order).sum()
    for renormalised, expected in ((True, plain / weights[chosen].sum()), (False, plain)):
        if close(result, (expected + beside).expand_as(result)):
            return renormalised
    raise export_error(
        "the results of experts are not weighted by a softmax of the router, or have a factor",
        one.topk,
    )


def _sum(
    graph: ModelGraph, found: Anchors, given: Mapping[fx.Node, Tensor], one: _Routed
) -> Tensor:
    """What a mixture adds to the stream: what the next norm reads, all else zero."""
    anchors = found.all()
    for x in found.normed.values():
        read = sources(x, anchors)
        if one.down in read:
            others = {n: torch.zeros(n.meta["val"].shape, dtype=torch.float64) for n in read}
            return evaluate(graph, x, {**others, **given})
    raise export_error("no norm reads the result of these experts", one.down)


def _depth(graph: ModelGraph, found: Anchors, node: fx.Node) -> int:
    name = found.linear[node].weight
    (placeholder,) = [p for p, n in graph.parameters.items() if n == name]
    return placeholder.meta["val"].dim()  # type: ignore[no-any-return]
