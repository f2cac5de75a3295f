"""A library for the passes over forward and backward: which collectives merge, and how.

Collectives are taken in the order of the graph, which is the order in which their inputs become
ready (of gradients: the parameter that forward uses last comes first), and fill a bucket until it
holds its size: the greedy rule of Megatron-Core's `param_and_grad_buffer`. One that fills a bucket
by itself stays alone: merged, it would be copied in and out, and save no latency worth having. A
graph is the same on all ranks of its axis, and so are its buckets.
"""

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import maker, replace
from autoshard.planning import reached, tensor_bytes
from autoshard.planning.cost import default_bucket_bytes, fill_buckets
from autoshard.runtime.graph_meta import BUCKET, CHANGE, MODULE

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_REDUCE = c10d.all_reduce.default
ALL_GATHER = c10d.all_gather_into_tensor.default
GATHER_TOGETHER = c10d.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
WAIT = c10d.wait_tensor.default

BUCKETED_GRADIENT = "bucket_gradients"
"""The pass that merges reductions; what it makes bears its name."""

GATHERS = (ALL_GATHER, GATHER_TOGETHER)
COLLECTIVES = (ALL_REDUCE, *GATHERS, REDUCE_SCATTER, c10d.all_to_all_single.default)


class Member(NamedTuple):
    """A collective that may be merged: its node, its wait, its input and its bytes on the wire."""

    node: fx.Node
    wait: fx.Node
    source: fx.Node
    nbytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Members of one bucket have it in common: operator, its arguments, dtype, kind."""
        kind = (self.node.meta.get("custom") or {}).get(BUCKET, "")
        return (self.node.target, *self.node.args[1:], self.source.meta["val"].dtype, kind)


def member(node: fx.Node) -> Member | None:
    """The collective at `node`, if its one user is the wait and its sizes are numbers."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not WAIT:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    tensors = [source.meta["val"], node.meta["val"]]
    if not all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
        return None
    # the logical size: an all-gather's output, a reduce-scatter's input (planning/cost/model.py)
    nbytes = max(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Member(node, users[0], source, nbytes)


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for a collective, one a result, in the order of the results."""
    results = [start] if start.target is not GATHER_TOGETHER else list(start.users)
    return [user for result in results for user in result.users if user.target is WAIT]


def start_of(wait: fx.Node) -> fx.Node:
    """The collective that a wait waits for: of a result of several, the one that makes them all."""
    (result,) = wait.all_input_nodes
    return result.all_input_nodes[0] if result.target is operator.getitem else result


def bucket_size(members: Sequence[Member]) -> int:
    """Default size of a bucket in bytes (`planning/cost/merged.py`)."""
    ranks = [next((arg for arg in one.node.args[1:] if isinstance(arg, int)), 1) for one in members]
    widths = [one.source.meta["val"].element_size() for one in members]
    return default_bucket_bytes(sum(one.nbytes for one in members), zip(widths, ranks))


def gathered(node: fx.Node) -> list[Member]:
    """The tensors that a gather makes whole, one or several."""
    if node.target is not GATHER_TOGETHER:
        found = member(node)
        return [] if found is None else [found]
    sources: Any = node.args[0]
    return [
        Member(node, wait, source, tensor_bytes(wait.meta["val"]))
        for source, wait in zip(sources, waits_of(node), strict=True)
    ]


def fill(
    members: Sequence[Member], bucket_bytes: int | None, most: bool = False
) -> list[list[Member]]:
    """Buckets of members with one key, in order; one closes when it holds `bucket_bytes`.

    most: it closes before it would hold more. Without `bucket_bytes` it does, at `bucket_size`.
    """
    limit = bucket_size(members) if bucket_bytes is None else bucket_bytes
    most = most or bucket_bytes is None
    sizes, keys = [one.nbytes for one in members], [one.key for one in members]
    buckets = fill_buckets(sizes, keys, limit, most)
    return [[members[i] for i in bucket] for bucket in buckets if len(bucket) > 1]


def kind_of(parameter: fx.Node) -> str:
    """ "tied", "experts" or "": weights of the first two have buckets of their own.

    A weight read in several places (a shared embedding) has its gradient when the first of them
    has run backward, which would hold up the bucket of the last. Expert weights, stacked on a
    first dim that batched products run over, are dense in size and sparse in use.
    """
    if len(parameter.users) > 1:
        return "tied"
    val = parameter.meta.get("val")
    user = next(iter(parameter.users), None)
    while user is not None and getattr(val, "dim", int)() == 3:
        if user.target in _BATCHED:
            return "experts"
        if user.target not in _PASSED or len(user.users) != 1:
            break
        user = next(iter(user.users))
    return ""


_BATCHED = tuple(
    getattr(aten, name).default
    for name in ("bmm", "baddbmm", "matmul", "einsum", "_grouped_mm")
    if hasattr(aten, name)
)
_PASSED = (aten.transpose.int, aten.permute.default, aten._to_copy.default, aten.t.default)


def bucket_maker(bucket: Sequence[Member], provenance: str) -> Callable[..., fx.Node]:
    """Makes nodes on behalf of a bucket, in the innermost module that contains all of it."""
    custom = [one.node.meta.get("custom") or {} for one in bucket]
    changes = {c.get(CHANGE, "").rpartition(": ")[2] for c in custom}
    merged = " | ".join(sorted(changes))
    said = {
        CHANGE: f"bucket of {len(bucket)}: {merged}",
        MODULE: ".".join(commonprefix([c.get(MODULE, "").split(".") for c in custom])),
    }
    return maker(bucket[0].node, provenance, custom=said)


def replace_members(bucket: Sequence[Member], results: Sequence[fx.Node]) -> None:
    """Use `results` instead of the members' waits, and erase the members."""
    for one, result in zip(bucket, results, strict=True):
        replace(one.wait, result)
        one.node.graph.erase_node(one.node)


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase what nothing reads any more of some nodes, and of what they were made from."""
    waiting, gone = sorted(nodes), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in gone and not node.users and node.op == "call_function":
            gone.add(node)
            waiting += node.all_input_nodes
            node.graph.erase_node(node)


def made_from(node: fx.Node, place: fx.Node) -> set[fx.Node]:
    """`node` and what it is made from, of the nodes that do not stand before `place`."""
    if node < place:
        return set()
    return {*reached([node], lambda one: [n for n in one.all_input_nodes if not n < place])}


def single_chains(graph: fx.Graph) -> set[fx.Node]:
    """The nodes from which one chain of single users leads to the output.

    Where a bucket is cut into its members, each slice is such a chain.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        users = list(node.users)
        one = len(users) == 1 or all(user.target is aten.slice.Tensor for user in users)
        if node.op == "output" or (users and one and all(user in found for user in users)):
            found.add(node)
    return found


def last_collectives(graph: fx.Graph, group: str) -> set[fx.Node]:
    """The collectives of `group` that only a gradient waits for, and no later one of the group.

    What is left of backward may be a single chain too: where the embedding is all that comes before
    it, the reduction of an activation's gradient leads to that of the embedding's, and to no other.
    """
    finishing = single_chains(graph)
    found: set[fx.Node] = set()
    awaited: set[fx.Node] = set()  # what a collective of the group is made from
    for node in reversed(graph.nodes):
        ours = node.target in COLLECTIVES and node.args[-1] == group
        if ours and node in finishing and node not in awaited:
            found.add(node)
        if ours or node in awaited:
            awaited.update(node.all_input_nodes)
    return found


def sort_stable(graph: fx.Graph) -> None:
    """Put the graph in an executable order again, keeping the order of nodes where it is one."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    missing = {node: len(node.all_input_nodes) for node in nodes}
    ready = [position[node] for node in nodes if not missing[node]]
    heapq.heapify(ready)
    output = nodes[-1]
    while ready:
        node = nodes[heapq.heappop(ready)]
        if node is not output:
            output.prepend(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
