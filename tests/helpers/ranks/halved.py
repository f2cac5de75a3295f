"""Programs whose layers run on halves of the batch: what stands between starts and waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from autoshard.passes.bucketing import COLLECTIVES, waits_of
from autoshard.passes.interleave_halves import half_of_each
from autoshard.planning import PRODUCTS, Plan, Prices, Request, packet, plan_graph, with_graph
from autoshard.planning.cost import Link
from autoshard.planning.halves import Found
from autoshard.program import Program
from autoshard.runtime.graph_meta import SPLIT_HALVES
from finished_ranks import SLOW


class Window(NamedTuple):
    """A collective of one half; products of this half and of the other between start and wait."""

    half: int
    op: str
    own: int
    other: int


def windows(gm: fx.GraphModule | None, group: str) -> list[Window]:
    """The collectives of a group that run on halves, in the order of their starts."""
    assert gm is not None
    half_of, nodes, found = half_of_each(gm.graph), list(gm.graph.nodes), []
    for start in nodes:
        half = half_of[start]
        if half is None or start.target not in COLLECTIVES or start.args[-1] != group:
            continue
        inside = nodes[nodes.index(start) + 1 : nodes.index(min(waits_of(start)))]
        products = [half_of[node] for node in inside if packet(node) in PRODUCTS]
        op = str(start.target).split(".")[1]
        found.append(Window(half, op, products.count(half), products.count(1 - half)))
    return found


def found(program: Program) -> Found:
    """What became of a graph that was to run on halves."""
    what: Found = program.graph_module.meta[SPLIT_HALVES]
    return what


def by_sequence(build: Callable[..., Program], n: int) -> Plan:
    """A plan whose residual stream is split by sequence, in a batch that n divides: on a machine
    where it costs nothing to rearrange it."""
    program = build({"tp": n}, overlap_halves=True)
    prices = Prices(1e-3, 10.0 / SLOW.memory_bandwidth, False, spreads_batch=False)
    links = {k: Link(one.latency, one.bandwidth, 1e30) for k, one in SLOW.links.items()}
    request = Request(parameters=program.parameters, prices=prices)
    decisions = plan_graph(program.serial, n, replace(SLOW, links=links), request)
    return with_graph(None, decisions, request, program.serial, n)
