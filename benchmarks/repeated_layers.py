"""A planned graph of a few layers, in pieces: what is before the layers, one of each kind, what is
after. Joined in any number they are the profile of a model, or of a pipeline's stage, at its depth.

A layer begins at the first use of its first parameter: what its norm does before that is counted to
the layer before, which makes every layer's piece whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.mesh_search.prices import MeshPrices
from autoshard.mesh_search.rank_stages import joined
from autoshard.planning import is_mixture
from autoshard.planning.cost import WAIT_SECONDS
from autoshard.planning.estimate import Profile, SavedForBackward
from autoshard.planning.operators import ATTENTION, aten, packet
from autoshard.runtime.collectives import forward_value

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """profiles: of what is before the layers, of a layer of each kind, and of what is after, with
    the activations of one batch. sent: bytes from one layer to the next."""

    profiles: Mapping[str, Profile]
    sent: int
    buffers: int

    def joined(self, kinds: Sequence[str], live: int = 1) -> Profile:
        """The profile of these pieces, one after the other, that keeps `live` batches at once."""
        whole = joined([self.profiles[kind] for kind in kinds])
        held = whole.activations
        kept = SavedForBackward(live * held.saved, held.transient)
        return replace(whole, activations=kept, buffers=self.buffers)


def spans_of(one: Profile, at: Mapping[str, int], count: int) -> dict[str, tuple[int, int]]:
    """The first operator of each piece, and the one behind its last."""
    starts: dict[int, int] = {}
    for weight in one.weights:
        if "layers." in weight.name and weight.use is not None:
            number = int(weight.name.split("layers.")[1].split(".")[0])
            starts[number] = min(weight.use, starts.get(number, weight.use))
    last = max(starts)
    starts[last + 1] = min(
        weight.use
        for weight in one.weights
        if weight.use is not None and weight.use > starts[last] and "layers." not in weight.name
    )
    spans = {kind: (starts[number], starts[number + 1]) for kind, number in at.items()}
    return {**spans, BEFORE: (0, starts[0]), AFTER: (starts[last + 1], count)}


class Keeps(NamedTuple):
    """What a trainer keeps for the backward otherwise than a compiler would. modules: Megatron's
    names of those that are computed again. offloaded: the inputs of checkpointed layers wait on
    the host. thrifty: what tp gathered is gathered again, activation functions run again, and what
    only products in float8 read is kept in that."""

    modules: tuple[str, ...] = ()
    offloaded: bool = False
    thrifty: bool = False
    float8: bool = False


def pieces_of(choices: MeshPrices, at: Mapping[str, int], keeps: Keeps) -> Pieces:
    """The pieces of a planned graph. at: the layer that stands for each kind."""
    nodes = list(choices.planned.serial.graph.nodes)
    one = choices.by_chunks if choices.planned.decisions.losses else choices.free
    again = again_of(choices, keeps)
    spans = spans_of(one, at, len(nodes))
    profiles = {kind: _part(one, again, *span, keeps.offloaded) for kind, span in spans.items()}
    crossing, middle = choices.stages.crossing, spans[next(iter(at))][1]
    around = [size for size, _ in crossing[max(0, middle - 12) : middle + 1] if size > 0]
    return Pieces(profiles=profiles, sent=min(around, default=0), buffers=one.buffers)


ACTIVATIONS = {aten.silu, aten.gelu}

#: Megatron's modules -> parts of the names of the weights whose products are computed again.
MODULES = {
    "mla_up_proj": ("q_b_proj", "kv_b_proj"),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared_experts": ("shared_experts",),
    "layernorm": ("norm",),
}


class Kept(NamedTuple):
    """What one operator leaves for the backward: bytes kept, those beside them while it is
    differentiated, seconds and bytes computed again, and in which region."""

    kept: int
    beside: int
    seconds: float
    repeated: int
    region: int


def again_of(choices: MeshPrices, keeps: Keeps) -> dict[int, list[Kept]]:
    """By operator, where regions of activation checkpointing are those of the model, and of these
    modules. LookupError for a module that is not known."""
    nodes, modules = list(choices.planned.serial.graph.nodes), keeps.modules
    place, front = {node: i for i, node in enumerate(nodes)}, choices.frontier
    names: tuple[str, ...] = ()
    for module in modules:
        if module not in (*MODULES, "core_attn", "moe", "moe_act"):
            raise LookupError(f"recomputation of {module} is not known")
        names += MODULES.get(module, ())
    found: dict[int, list[Kept]] = {}
    for value, saved, repeated in front.kept():
        node, seconds = value.key[0], value.seconds if repeated else 0.0
        weights = [choices.planned.parameters.get(one, "") for one in node.all_input_nodes]
        ours = any(name in weight for name in names for weight in weights)
        ours |= "core_attn" in modules and packet(node) in ATTENTION
        ours |= "moe" in modules and is_mixture(node)
        beside = value.nbytes * (1 if saved else 2) if value.held else 0
        gathered = value.key[1] != forward_value(choices.stages.saving.decisions.state(node))
        if ours and saved:
            saved, repeated, seconds = 0, saved, value.seconds
        elif keeps.thrifty and saved and gathered:
            saved, seconds = saved // choices.n, value.seconds
        elif keeps.thrifty and packet(node) in ACTIVATIONS:
            saved, seconds = 0, value.seconds
        elif "moe_act" in modules and is_mixture(node):  # what the last product reads
            saved -= value.inner // 4
        if keeps.thrifty and keeps.float8 and {*map(packet, node.users)} == {aten.linear}:
            saved //= 2
        region = value.again if value.again >= 0 else -1 - place[node]
        one = Kept(saved, beside, seconds, repeated, region)
        found.setdefault(place[node], []).append(one)
    return found


def _part(
    one: Profile, again: Mapping[int, Sequence[Kept]], a: int, b: int, offloaded: bool
) -> Profile:
    """The profile of the operators from a to b - 1; what is computed again lies in its backward,
    and what rows do that travel to experts, among what is sent."""
    own = [each for i in range(a, b) for each in again.get(i, ())]
    kept, regions = sum(each.kept for each in own), dict[int, int]()
    for each in own:
        if each.repeated:
            regions[each.region] = regions.get(each.region, 0) + each.repeated
    beside = max((each.beside for each in own), default=0)
    if offloaded and regions:
        kept, beside = 0, max(beside, 2 * kept)
    transient = max(regions.values(), default=0) + beside
    forward, travel = list(one.forward), [s for each in one.exchanges for s in each]
    for each in one.exchanges:
        forward[each[0].at] += WAIT_SECONDS
    more = [sum(each.seconds for each in again.get(i, ())) for i in range(a, b)]
    return replace(
        one,
        forward=tuple(forward[a:b]),
        backward=tuple(map(sum, zip(one.backward[a:b], more))),
        sent=tuple(
            sent._replace(at=sent.at - a, beside=tuple(i - a for i in sent.beside if a <= i < b))
            for sent in (*one.sent, *travel)
            if a <= sent.at < b
        ),
        exchanges=(),
        weights=tuple(
            replace(weight, use=weight.use - a)
            for weight in one.weights
            if weight.use is not None and a <= weight.use < b
        ),
        activations=SavedForBackward(kept, transient),
    )
