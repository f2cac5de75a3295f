"""The MLPs of a decoder: activation, gate, which projection is which; and mixtures of experts,
stacks of matrices and the router that chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors
from autoshard.export.decoder.probing import activation, close, evaluate, gated_activation, sources
from autoshard.export.decoder.structure import Linear, Mlp
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph

aten = torch.ops.aten


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
    """The MLPs in order of their down-projections, which read projections only, none with a role;
    theirs get one."""
    anchors, mlps = found.all(), []
    for down, x in found.inputs.items():
        feeds = sources(x, anchors)
        if down in role or any(n not in found.linear or n in role for n in feeds):
            continue
        mlp = read_mlp(graph, found, down, feeds)
        mlps.append(LayerMlp(mlp, tuple(found.linear[node] for node in feeds), down))
        role.update({**dict.fromkeys(feeds, "up"), down: "down"})
    return mlps


def read_mlp(graph: ModelGraph, found: Anchors, down: fx.Node, feeds: list[fx.Node]) -> Mlp:
    """The MLP whose down-projection reads `feeds`: up, or gate and up, apart or as one."""
    linear, x = found.linear, found.inputs[down]
    first, width = linear[feeds[0]], linear[down].inputs
    if len(feeds) == 1 and first.outputs == width:
        name = activation(_between(graph, x, [(feeds[0], 0)], width))
        if name is not None:
            return Mlp(up=first, gate=None, down=linear[down], activation=name)
    elif len(feeds) == 1 and first.outputs == 2 * width:
        gated = gated_activation(_between(graph, x, _halves(feeds[0], width), width))
        if gated is not None:
            return _halved(first, gated, linear[down])
    elif len(feeds) == 2 and first.outputs == linear[feeds[1]].outputs == width:
        gated = gated_activation(_between(graph, x, [(node, 0) for node in feeds], width))
        if gated is not None:
            name, index = gated
            up, gate = linear[feeds[1 - index]], linear[feeds[index]]
            return Mlp(up=up, gate=gate, down=linear[down], activation=name)
    raise export_error("its input is no activation, gated or not, that is known", down)


def _halves(both: fx.Node, width: int) -> list[tuple[fx.Node, int]]:
    return [(both, 0), (both, width)]


def _halved(both: Linear, gated: tuple[str, int], down: Linear) -> Mlp:
    """An MLP whose gate is one half of a projection, and up the other."""
    halves = [replace(both, rows=rows) for rows in torch.arange(2 * down.inputs).chunk(2)]
    name, index = gated
    return Mlp(up=halves[1 - index], gate=halves[index], down=down, activation=name)


def _between(
    graph: ModelGraph, x: fx.Node, places: Sequence[tuple[fx.Node, int]], width: int
) -> Callable[..., Tensor]:
    """What `x` has in its first columns where each of `places`, (node, its first column), has given
    values; in as many pieces as fit the width: narrow test models have few columns."""

    def run(*values: Tensor) -> Tensor:
        pieces = []
        for start in range(0, len(values[0]), width):
            given: dict[fx.Node, Tensor] = {}
            parts = [value[start : start + width] for value in values]
            for (node, column), part in zip(places, parts, strict=True):
                empty = torch.zeros(node.meta["val"].shape, dtype=torch.float64)
                given.setdefault(node, empty)[..., column : column + len(part)] = part
            result = evaluate(graph, x, given)
            pieces.append(result.reshape(-1, result.shape[-1])[0, : len(parts[0])])
        return torch.cat(pieces)

    return run


def read_experts(graph: ModelGraph, found: Anchors, role: dict[fx.Node, str]) -> list[LayerMlp]:
    """The mixtures of experts, in order; their projections get a role. Empty where there are none.

    Each is two stacks of matrices, gate and up of all experts in one and down in the other, and
    may have an MLP of all tokens beside it. Raises ExportError where the chosen experts are not
    weighted by a softmax, or for another form.
    """
    stacked = {name for node, name in graph.parameters.items() if node.meta["val"].dim() == 3}
    stacks = [node for node, one in found.linear.items() if one.weight in stacked]
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
        mixtures.append(_Mixture(graph, found, first, down, router, topk))
    shared = read_mlps(graph, found, role)  # of all tokens
    if shared and len(shared) != len(mixtures):
        raise export_error(
            f"{len(mixtures)} mixtures of experts and {len(shared)} MLPs beside them; all layers "
            "or none have one",
            shared[0].down,
        )
    return [one.read(role, shared[i] if shared else None) for i, one in enumerate(mixtures)]


@dataclass(frozen=True)
class _Mixture:
    """One mixture of a graph: both stacks, and the router that `topk` reads."""

    graph: ModelGraph
    found: Anchors
    first: fx.Node
    down: fx.Node
    router: fx.Node
    topk: fx.Node

    def read(self, role: dict[fx.Node, str], shared: LayerMlp | None) -> LayerMlp:
        linear = self.found.linear
        router, down, both = linear[self.router], linear[self.down], linear[self.first]
        if both.outputs != 2 * down.inputs:
            raise export_error(
                f"{both.outputs} outputs are not gate and up of a down-projection of "
                f"{down.inputs} inputs",
                self.first,
            )
        places, x = _halves(self.first, down.inputs), self.found.inputs[self.down]
        gated = gated_activation(_between(self.graph, x, places, down.inputs))
        if gated is None:
            raise export_error(
                "the experts are not act(gate) * up with gate and up in halves", down.node
            )
        gate = None if shared is None else self._shared_gate(role)
        mlp = replace(
            _halved(both, gated, down),
            router=router,
            experts=router.outputs,
            top_k=int(self.topk.args[1]),  # type: ignore[arg-type]
            renormalised=self._renormalised(shared, gate),
            shared=None if shared is None else shared.mlp,
            shared_gate=None if gate is None else linear[gate],
        )
        readers, routed = [router], [self.down, self.router]
        if shared is not None:
            readers += shared.readers
            routed.append(shared.down)
        if gate is not None:
            readers.append(linear[gate])
            routed.append(gate)
        return LayerMlp(mlp, tuple(readers), self.down, tuple(routed))

    def _shared_gate(self, role: dict[fx.Node, str]) -> fx.Node | None:
        """The projection to one number that stands between the shared MLP's input and result."""
        found, anchors = self.found, self.found.all()
        (norm,) = sources(found.inputs[self.router], anchors)
        for node, x in found.inputs.items():
            single = found.linear[node].outputs == 1 and node not in role
            if single and sources(x, anchors) == [norm]:
                role[node] = "router"
                return node
        return None

    def _renormalised(self, shared: LayerMlp | None, gate: fx.Node | None) -> bool:
        """Whether the weights of the chosen experts sum to 1; else they are those of the softmax.

        Told by values: all tokens have the same logits, the chosen experts result in 1, 2, ...
        """
        experts = self.found.linear[self.router].outputs
        tokens = self.router.meta["val"].numel() // experts
        logits = torch.linspace(-1, 2, experts, dtype=torch.float64).roll(1)
        weights = logits.softmax(0)
        chosen = weights.topk(int(self.topk.args[1])).indices.sort().values  # type: ignore[arg-type]
        order = torch.arange(1, len(chosen) + 1)
        rows = self.down.meta["val"]
        if rows.dim() == 2 and rows.shape[0] == tokens * len(chosen):
            value = order.repeat_interleave(tokens).unsqueeze(1)
        elif rows.dim() == 3 and rows.shape[0] == experts:
            value = torch.zeros(experts, 1, 1, dtype=torch.long)
            value[chosen, 0, 0] = order
        else:
            raise export_error(f"a stack of experts results in {tuple(rows.shape)}", self.down)
        given: dict[fx.Node, Tensor] = {
            self.router: logits.expand(self.router.meta["val"].shape),
            self.down: value.double().expand(rows.shape),
        }
        beside = 0.0
        if shared is not None:
            beside = 10.0
            given[shared.down] = _full(shared.down, beside)
        if gate is not None:
            given[gate] = _full(gate, 0.7)
            beside *= torch.tensor(0.7, dtype=torch.float64).sigmoid().item()
        result = self._sum(given).flatten()
        plain = (weights[chosen] * order).sum()
        for renormalised, expected in ((True, plain / weights[chosen].sum()), (False, plain)):
            if close(result, (expected + beside).expand_as(result)):
                return renormalised
        raise export_error(
            "the results of experts are not weighted by a softmax of the router, or have a factor",
            self.topk,
        )

    def _sum(self, given: Mapping[fx.Node, Tensor]) -> Tensor:
        """What a mixture adds to the stream: what the next norm reads, all else zero."""
        for x in self.found.normed.values():
            read = sources(x, self.found.all())
            if self.down in read:
                return evaluate(self.graph, x, {**{n: _full(n, 0.0) for n in read}, **given})
        raise export_error("no norm reads the result of these experts", self.down)


def _full(node: fx.Node, value: float) -> Tensor:
    return torch.full(node.meta["val"].shape, value, dtype=torch.float64)
