"""What the plan of a program costs beside plans with a name: Megatron's TP and TP+SP, FSDP, DDP.

"Megatron TP" is the cheapest plan that splits no activation along the sequence, "Megatron TP+SP"
the cheapest one where every saved activation that can be split is. All are planned on the captured
graph and priced on their local graphs by one rule, so that they compare: communication by the
alpha-beta model of each axis, matrix products by the roofline, and bytes a rank. Nothing overlaps
in these figures, and pointwise operators are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.passes import DIFF, Localize, local_value, rank_program
from autoshard.planning import (
    TRAINED_BYTES,
    Decisions,
    Prices,
    Request,
    cost,
    fusible,
    is_lookup,
    plan_graph,
    tensor_bytes,
    value,
)
from autoshard.planning.cost import default_bucket_bytes, reference_bytes
from autoshard.program import Program
from autoshard.runtime.collectives import Axis, change, shard_dim

# How much dearer than by default a saved activation is, so that what can be split along the
# sequence is.
_DEAR = 20.0


@dataclass(frozen=True)
class Alternative:
    """One plan of the same model and batch on as many ranks.

    mesh: sizes by axis. sent: bytes a rank sends a step. communication, arithmetic: seconds a
    step. stored: bytes a rank of parameters, gradients and Adam's moments. activations: bytes a
    rank keeps for the backward, about. batches: example batches that the ranks consume a step.
    """

    name: str
    mesh: Mapping[str, int]
    sent: float
    communication: float
    arithmetic: float
    stored: int
    activations: int
    batches: int

    @property
    def seconds(self) -> float:
        """Communication and arithmetic for one example batch, one after the other."""
        return (self.communication + self.arithmetic) / self.batches


def alternatives(program: Program) -> list[Alternative]:
    """The plan of `program` first, then those with a name; empty for a world of one rank."""
    sizes = {axis.name: axis.size for axis in program.mesh.axes if axis.size > 1}
    if not sizes:
        return []
    n, world = program.axis.size, program.mesh.size
    found = [_priced("this plan", program, program.decisions, sizes, 1)]
    hardware = program.decisions.hardware
    dear = Prices(None, _DEAR * 2.0 / hardware.memory_bandwidth)
    if n > 1:
        for name, sequence, prices in (
            ("Megatron TP", False, Prices()),
            ("Megatron TP+SP", True, dear),
        ):
            request = _request(program, sequence, prices)
            decisions = plan_graph(program.serial, n, hardware, request)
            found.append(_priced(name, program, decisions, sizes, 1))
    whole = plan_graph(program.serial, 1, hardware, _request(program, True, Prices()))
    for name, axis in (("FSDP (ZeRO-3)", "dp_shard"), ("DDP", "dp_replicate")):
        if sizes != {axis: world} or (axis == "dp_shard" and program.config.zero != 3):
            found.append(_priced(name, program, whole, {axis: world}, n))
    return found


def _request(program: Program, sequence: bool, prices: Prices) -> Request:
    return Request(
        parameters=program.parameters,
        sequence_parallel=sequence,
        lazy_outputs=program.config.outputs != "replicate",
        prices=prices,
    )


def _priced(
    name: str, program: Program, decisions: Decisions, sizes: Mapping[str, int], batches: int
) -> Alternative:
    hardware = program.decisions.hardware
    axis = Axis("tp", sizes.get("tp", 1), 0, "alternative")
    graph = _local_graph(program, decisions, axis)
    moved = [(op, "tp", size, 1) for op, size in _planned_traffic(graph, decisions, axis)]
    moved += _data_traffic(program, decisions, axis, sizes)
    sent = seconds = 0.0
    for op, on, size, buckets in moved:
        # as many ranks as a tp axis has stand in one node
        ring, link = sizes[on], hardware.links["tp" if sizes[on] <= program.axis.size else on]
        sent += cost.ring_bytes(op, size, ring)
        seconds += cost.collective_seconds(op, size, ring, link)
        seconds += (buckets - 1) * cost.collective_seconds(op, 0, ring, link)
    arithmetic = 0.0
    for node in graph.nodes:
        if flops := cost.node_flops(node):
            passes = 3 if node.meta.get(DIFF) else 1
            dtype = node.meta["val"].dtype if isinstance(value(node), torch.Tensor) else None
            arithmetic += passes * cost.node_seconds(
                flops, cost.node_bytes(node), dtype or torch.float32, hardware
            )
    stored = _stored(program, decisions, axis, sizes)
    kept = _activations(graph)
    return Alternative(name, dict(sizes), sent, seconds, arithmetic, stored, kept, batches)


def _local_graph(program: Program, decisions: Decisions, axis: Axis) -> fx.Graph:
    """One rank's graph, with the value of every node."""
    return rank_program(program.serial, (Localize(decisions),), axis)[0].graph


def _planned_traffic(
    graph: fx.Graph, decisions: Decisions, axis: Axis
) -> list[tuple[str, int]]:
    """(collective, logical bytes) on the planned axis, forward and backward."""
    found: list[tuple[str, int]] = []
    vectors = 0  # gradients of weights used as V: one bucket
    for node in graph.nodes:
        if node.target is not change:
            continue
        source, have, want = node.args[:3]
        assert isinstance(source, fx.Node)
        whole = tensor_bytes(value(source)) * (axis.size if shard_dim(str(have)) is not None else 1)
        forward, backward = cost.change_collectives(str(have), str(want))
        if not node.meta.get(DIFF):
            backward = ()
        if source.op == "placeholder" and backward == ("all_reduce",):
            vectors += whole
            backward = ()
        found += [
            (op, whole // axis.size if op == "all_to_all" else whole)
            for op in (*forward, *backward)
        ]
    if vectors:
        found.append(("all_reduce", vectors))
    for node, strategy in decisions.strategies.items():
        diff = bool(node.meta.get(DIFF))
        found += [(t.op, t.nbytes) for t in strategy.traffic if diff or not t.backward]
    return found


def _data_traffic(
    program: Program, decisions: Decisions, axis: Axis, sizes: Mapping[str, int]
) -> list[tuple[str, str, int, int]]:
    """(collective, axis, bytes of all parameters together, buckets) on the data-parallel axes."""
    shard, replicate = sizes.get("dp_shard", 1), sizes.get("dp_replicate", 1)
    read = again = trained = item = 0
    for node in program.parameters:
        val = local_value(value(node), decisions.stored[node], axis)
        read += tensor_bytes(val)
        trained += tensor_bytes(val) if val.requires_grad else 0
        # the backward of a lookup needs the indices only
        again += 0 if all(map(is_lookup, node.users)) else tensor_bytes(val)
        item = max(item, val.element_size())
    reference = reference_bytes(max(item, 1), shard)
    found: list[tuple[str, str, int, int]] = []

    def add(op: str, on: str, size: int) -> None:
        if size:
            limit = program.config.bucket_bytes or default_bucket_bytes(size, reference)
            found.append((op, on, size, math.ceil(size / limit)))

    if shard > 1:
        add("all_gather", "dp_shard", read)
        if program.config.zero == 3:
            add("all_gather", "dp_shard", again)
        add("reduce_scatter", "dp_shard", trained)
    if replicate > 1:
        add("all_reduce", "dp_replicate", trained // shard)
    return found


def _stored(
    program: Program, decisions: Decisions, axis: Axis, sizes: Mapping[str, int]
) -> int:
    total = 0.0
    for node in program.parameters:
        val = local_value(value(node), decisions.stored[node], axis)
        kept = TRAINED_BYTES if val.requires_grad else 1.0
        total += kept * tensor_bytes(val) / sizes.get("dp_shard", 1)
    return int(total)


def _activations(graph: fx.Graph) -> int:
    """Bytes that the backward needs, about: each value that an unfused operator reads or that
    several operators read (a residual stream), and the log-probabilities of a loss."""
    kept: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is change or not node.meta.get(DIFF):
            continue
        if not fusible(node):
            for source in node.all_input_nodes:
                _keep(source, kept)
                if not isinstance(value(node), torch.Tensor) or value(node).dim() == 0:
                    kept[node] = max(kept.get(node, 0), tensor_bytes(value(source)))
        elif len(node.users) > 1 and not _is_view(node):
            _keep(node, kept)
    return sum(kept.values())


def _keep(source: fx.Node, kept: dict[fx.Node, int]) -> None:
    while _is_view(source) or _is_local_change(source):
        source = source.all_input_nodes[0]
    if source.op == "call_function" and source.meta.get(DIFF):
        kept[source] = tensor_bytes(value(source))


def _is_local_change(node: fx.Node) -> bool:
    """A change of state that keeps the bytes; what is gathered is kept whole."""
    return node.target is change and shard_dim(str(node.args[1])) is None


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        target.is_view or target is torch.ops.aten.reshape.default
    )
