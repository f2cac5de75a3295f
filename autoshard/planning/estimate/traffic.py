"""The collectives of a training step, listed from the plan and priced.

On the planned axis (tp or cp) they follow from the states of the values, as `localize` rewrites
them; gradients of weights go in buckets, as `bucket_gradients` merges them. On the data-parallel
axes a bucket of parameters is gathered before its use (and again in backward with ZeRO-3), its
gradient is reduce-scattered over `dp_shard` and all-reduced over `dp_replicate`. The volumes are
those of Megatron-Core's and ZeRO's ledgers (S. Rajbhandari et al., "ZeRO: memory optimizations
toward training trillion parameter models", 2020, section 7); the padding of a bucket of gradients
is counted on the planned axis only. What those of one weight take, before its bucket is known, is
that of a bucket of this weight alone, but that a bucket's latency is shared by its members by their
bytes (`DataAxes`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.chunked_loss import chunks_of
from autoshard.planning.cost import Link, aligned, default_bucket_bytes, fill_buckets
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate.weights import (
    Layout,
    Training,
    Weight,
    sent_bytes,
    weight_of,
)
from autoshard.planning.mixtures import ROWS, exchanged_beside, is_mixture
from autoshard.planning.strategy import operands, value
from autoshard.planning.values import differentiable, global_bytes
from autoshard.runtime.collectives import WHOLE, P, State, forward_value, shard_dim
from autoshard.runtime.graph_meta import DIFF


class Sent(NamedTuple):
    """One collective of a step; `nbytes` is its logical size (planning/cost/model.py).

    at: the position in the graph where it is waited for: of the operator that causes it, of the
    first use of a bucket of parameters. copied: bytes that are read and written to rearrange
    what is not split along its outermost dim. beside: positions of the products that it is one
    operator with, or, in backward, of those whose operand's gradient it is one with.
    """

    axis: str
    op: str
    nbytes: int
    backward: bool
    at: int
    copied: int = 0
    beside: tuple[int, ...] = ()
    copies: int = 0


class Traffic(NamedTuple):
    """What a rank sends on one axis in a step, in bytes, the seconds its collectives take, and
    how many they are."""

    nbytes: float
    seconds: float
    collectives: int


def seconds(one: Sent, ranks: Mapping[str, int], links: Mapping[str, Link]) -> float:
    """Seconds of one collective. ranks, links: by axis; links at the rates they really have."""
    link = links[one.axis]
    on_the_wire = cost.collective_seconds(
        one.op, one.nbytes, ranks[one.axis], link, copies=one.copies
    )
    return on_the_wire + one.copied / link.copy_bandwidth


def sent_by_axis(
    sent: Iterable[tuple[Sent, int]], ranks: Mapping[str, int], links: Mapping[str, Link]
) -> dict[str, Traffic]:
    """What a rank sends on each axis. sent: each collective, and how often."""
    found: dict[str, Traffic] = {}
    for one, times in sent:
        before = found.get(one.axis, Traffic(0.0, 0.0, 0))
        found[one.axis] = Traffic(
            before.nbytes + times * cost.ring_bytes(one.op, one.nbytes, ranks[one.axis]),
            before.seconds + times * seconds(one, ranks, links),
            before.collectives + times,
        )
    return found


def data_collectives(bucket: Sequence[Weight], layout: Layout, training: Training) -> list[Sent]:
    """The collectives of one bucket of parameters on the data-parallel axes.

    What two axes of shards split is gathered over dp_shard first: the part of a rank of ep, or of a
    cp that stands beside tp.
    """
    if not bucket:
        return []
    at, sent, stored = bucket[0].use or 0, [], partial(Weight.stored_part, layout=layout)
    over_ep = [weight for weight in bucket if not weight.stays(layout.experts)]
    if layout.shard > layout.inner:
        split = [weight for weight in bucket if weight.choice != WHOLE]
        sent += _of_shards("dp_shard", split, layout, training, layout.inner)
        whole = [weight for weight in bucket if weight.choice == WHOLE]
        summed = sent_bytes(whole, stored, training)
        sent.append(Sent("dp_shard", "all_reduce", summed, True, at))
    if layout.outer > 1:
        sent += _of_shards("cp", bucket, layout, training, 1)
    if layout.experts > 1:
        sent += _of_shards("ep", over_ep, layout, training, 1)
    if layout.replicate > 1:
        reduced = sent_bytes(bucket, stored, training)
        sent.append(Sent("dp_replicate", "all_reduce", reduced, True, at))
    return [one._replace(at=at) for one in sent if one.nbytes]


def _of_shards(
    axis: str, bucket: Sequence[Weight], layout: Layout, training: Training, parts: int
) -> list[Sent]:
    """The gathers and the reduction over one axis, each of one of `parts` of the weights."""
    sizes = {w.name: layout.shard * w.part(layout.shard) * w.itemsize // parts for w in bucket}
    sent = [Sent(axis, "all_gather", sum(sizes.values()), False, 0)]
    twice = sum(sizes[w.name] for w in bucket if w.again and w.gathered_twice(layout))
    sent.append(Sent(axis, "all_gather", twice, True, 0))
    scattered = sent_bytes(bucket, partial(Weight.part, ranks=layout.shard), training)
    reduced = layout.shard * scattered // parts
    return [*sent, Sent(axis, "reduce_scatter", reduced, True, 0)]


def expert_rows(
    gm: fx.GraphModule, decisions: Decisions, n: int, imbalance: float = 1.0
) -> list[tuple[Sent, ...]]:
    """What each mixture sends whose rows travel over ep beside a planned axis of n. imbalance: as
    in Training."""
    any_ranks = 2  # the sizes are those of any number, but of the counts, which are small
    return [
        tuple(
            Sent("ep", one.op, int(imbalance * one.nbytes), one.backward, at, copies=one.copies)
            for one in exchanged_beside(node, decisions.strategies[node], n, any_ranks)
            if differentiable(node) or not one.backward
        )
        for at, node in enumerate(gm.graph.nodes)
        if is_mixture(node) and decisions.strategies[node].on_ep == ROWS
    ]


def tp_collectives(
    gm: fx.GraphModule, decisions: Decisions, n: int, bucket_bytes: int | None = None
) -> list[Sent]:
    """The collectives of a plan on an axis of `n` ranks.

    A value is changed once for each state it is used in. Buckets of gradients end the backward.
    """
    found: list[Sent] = []
    gradients: list[tuple[int, str, fx.Node]] = []
    done: set[tuple[fx.Node, State]] = set()
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    by_chunks = chunks_of(decisions.losses).inside
    axis = decisions.prices.name

    def read(source: fx.Node, want: State, user: fx.Node) -> None:
        have = decisions.state(source)
        if (source, want) in done:
            return
        for state in decisions.route(source, want):
            if (source, state) not in done:
                done.add((source, state))
                weight = source in decisions.stored
                at = place[source if weight else user]
                parts = decisions.prices.parts.get(source, 1)
                sent = _change(source, have, state, n, at, axis, parts)
                if decisions.gathers_again(source, have, state) and user not in by_chunks:
                    found.extend(one._replace(backward=True, at=place[user]) for one in sent[:1])
                beside = _beside(source, have, state, decisions, place)
                for one in (each._replace(beside=beside) for each in sent):
                    if one.backward and _only_a_weight(source, decisions):
                        gradients.append((place[user], one.op, source))
                    else:
                        found.append(one)
            have = state

    for node, strategy in decisions.strategies.items():
        for source, want in zip(operands(node), strategy.inputs):
            read(source, want, node)
        for t in strategy.traffic:
            if differentiable(node) or not t.backward:
                found.append(Sent(t.axis or axis, t.op, t.nbytes, t.backward, place[node]))
    output = next(iter(reversed(gm.graph.nodes)))
    for result, state in zip(output.args[0], decisions.outputs):  # type: ignore[arg-type]
        if isinstance(result, fx.Node) and isinstance(value(result), torch.Tensor):
            read(result, state, output)
    # the gradient of what forward reads last is there first
    gradients.sort(key=lambda one: -one[0])
    members = [(op, source) for _, op, source in gradients]
    return [*found, *gradient_buckets(members, n, bucket_bytes, axis)]


def _beside(
    source: fx.Node, have: State, want: State, decisions: Decisions, place: Mapping[fx.Node, int]
) -> tuple[int, ...]:
    """The products that a change of state is one operator with, where the plan was priced so."""
    dim = shard_dim(want if have == P else have)
    prices = decisions.prices
    if prices.fusing is None or dim not in cost.fused_dims(value(source).shape, prices.n):
        return ()
    if have == P:
        return (place[source],) if cost.product_flops(source) else ()
    if shard_dim(want) is not None or want == P:
        return ()
    strategies = decisions.strategies
    return tuple(
        place[user]
        for user in source.users
        if user in strategies
        and cost.multiplies(user, source)
        and want in strategies[user].inputs[:2]
    )


def _only_a_weight(source: fx.Node, decisions: Decisions) -> bool:
    """Whether `source` is a stored weight, or made of one weight alone (`1 + weight`): nothing but
    the weight's gradient waits for the gradient of `source`, so that it goes in a bucket."""
    while source not in decisions.stored:
        made_of = operands(source)
        if len(made_of) != 1 or len(made_of[0].users) > 1:
            return False
        source = made_of[0]
    return True


def _change(
    source: fx.Node, have: State, want: State, n: int, at: int, axis: str, part_of: int
) -> list[Sent]:
    if n == 1 or have == want:
        return []
    if not differentiable(source) and forward_value(have) == forward_value(want):
        return []
    whole = global_bytes(source) // part_of
    forward, backward = cost.change_collectives(have, want)
    passes = [(op, False) for op in forward]
    passes += [(op, True) for op in backward if differentiable(source)]
    outer = cost.outer_dim(value(source).shape)
    copies = 2 * sum((shard_dim(state) or 0) > outer for state in (have, want))
    sizes = {op: whole // n if op == "all_to_all" else whole for op, _ in passes}
    return [Sent(axis, op, sizes[op], late, at, copies * sizes[op]) for op, late in passes]


def gradient_buckets(
    members: Sequence[tuple[str, fx.Node]], n: int, bucket_bytes: int | None, axis: str = "tp"
) -> Iterator[Sent]:
    """Reductions of the gradients of parameters, in order, as `bucket_gradients` merges them."""
    if not members:
        return
    sizes = [global_bytes(source) for _, source in members]
    ranks = [n if op == "reduce_scatter" else 1 for op, _ in members]
    items = [value(source).element_size() for _, source in members]
    limit = bucket_bytes or default_bucket_bytes(sum(sizes), zip(items, ranks))
    keys = [(op, value(source).dtype) for op, source in members]
    for bucket in fill_buckets(sizes, keys, limit, bucket_bytes is None):
        first = bucket[0]
        nbytes, parts, item = sizes[first], ranks[first], items[first]
        if len(bucket) > 1:
            nbytes = item * parts * aligned([sizes[i] // item // parts for i in bucket], parts)[1]
        yield Sent(axis, members[first][0], nbytes, True, 0)


@dataclass(frozen=True, kw_only=True)
class DataAxes:
    """The data-parallel axes beside a planned axis of `n` ranks.

    ranks, links: of all axes, by name. second: seconds of a step that a second of their collectives
    is charged; less than one where compute hides them. bucket: bytes of one.
    """

    n: int
    layout: Layout
    ranks: Mapping[str, int]
    links: Mapping[str, Link]
    second: float
    bucket: int

    def took(self, sent: Sent) -> float:
        """Seconds of a collective without the share of its latency that other weights pay."""
        latency = cost.collective_seconds(sent.op, 0, self.ranks[sent.axis], self.links[sent.axis])
        others = latency * (1 - min(1.0, sent.nbytes / self.bucket))
        return seconds(sent, self.ranks, self.links) - others

    def weight(self, node: fx.Node, state: State, again: bool, experts: int = 0) -> Weight:
        """A parameter in a state on the planned axis. again, experts: as in `Weight`."""
        trained, more = bool(node.meta.get(DIFF)), {"again": again, "experts": experts}
        return weight_of(node, state, self.n, name=node.name, trained=trained, use=0, **more)
