"""The reshard plan: every element that a rank lacks once, and senders as level as any division."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import networkx
import numpy as np
import pytest
import torch

from autoshard.errors import AutoshardError
from autoshard.runtime.collectives import I, S
from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.parameters import local_bounds
from autoshard.weights.boxes import Box, apart, common, elements, slices, view, without
from autoshard.weights.moves import Layouts, Move, Want, levelled, plan_moves, rounds

SLICE = 64


def least_fullest(demands: dict[tuple[int, ...], int]) -> int:
    """The least that the fullest sender can have: by maximum flows, of networkx."""
    low, high = 0, sum(demands.values())
    while low < high:
        middle = (low + high) // 2
        graph = networkx.DiGraph()
        for senders, size in demands.items():
            graph.add_edge("all", senders, capacity=size)
            for rank in senders:
                graph.add_edge(senders, rank)
                graph.add_edge(rank, "sent", capacity=middle)
        flows = networkx.maximum_flow_value(graph, "all", "sent")
        low, high = (low, middle) if flows == sum(demands.values()) else (middle + 1, high)
    return low


def drawn_boxes(draw: np.random.Generator, shape: tuple[int, ...], ranks: int) -> dict[int, Box]:
    """What each rank holds of a tensor on a drawn mesh of two axes, some of them replicas."""
    sizes = [n for n in (1, 2, 3, 4) if ranks % n == 0]
    tp = int(draw.choice(sizes))
    states = {
        name: str(draw.choice([I, *(S(dim) for dim in range(len(shape)))]))
        for name in ("tp", "dp_shard")
    }
    mesh = {"dp_shard": ranks // tp, "tp": tp}
    return {
        rank: tuple(local_bounds(shape, states, offline_mesh(mesh, rank).axes))
        for rank in range(ranks)
    }


def drawn_layouts(seed: int) -> tuple[Layouts, dict[str, tuple[int, ...]]]:
    draw = np.random.default_rng(seed)
    n, m = (int(x) for x in draw.integers(1, 7, 2))
    shared = int(draw.integers(0, min(n, m) + 1))  # ranks that hold and want
    shapes = {f"t{i}": tuple(draw.integers(1, 9, draw.integers(0, 4)).tolist()) for i in range(6)}
    holds: dict[int, dict[str, Box]] = {rank: {} for rank in range(n)}
    wants: dict[int, dict[str, Want]] = {n - shared + rank: {} for rank in range(m)}
    for name, shape in shapes.items():
        for rank, box in drawn_boxes(draw, shape, n).items():
            holds[rank][name] = box
        for rank, box in drawn_boxes(draw, shape, m).items():
            boxes = (box, tuple((0, min(2, size)) for size in shape))[: int(draw.integers(1, 3))]
            wants[n - shared + rank][name] = Want(boxes, int(draw.choice([1, 2, 4])))
    nodes = {rank: rank // int(draw.choice([2, 99])) for rank in {*holds, *wants}}
    return Layouts(holds, wants, nodes), shapes


def owners_of(layouts: Layouts, move: Move) -> tuple[int, ...]:
    """The ranks that may send what a move sends."""
    holds = [
        rank
        for rank, boxes in sorted(layouts.holds.items())
        if (box := boxes.get(move.name)) is not None and common(box, move.box) == move.box
    ]
    near = [rank for rank in holds if layouts.nodes[rank] == layouts.nodes[move.receiver]]
    return tuple(near or holds)


def run(layouts: Layouts, shapes: dict[str, tuple[int, ...]], moves: list[Move]) -> Counter[int]:
    """Check on real tensors that moves bring what is wanted; bytes received by each rank."""
    received = Counter[int]()
    wholes = {
        name: torch.arange(int(np.prod(shape, dtype=int))).reshape(shape)
        for name, shape in shapes.items()
    }
    arrived = {
        (rank, name): torch.full_like(wholes[name], -1)
        for rank, wants in layouts.wants.items()
        for name in wants
    }
    for move in moves:
        whole, held = wholes[move.name], layouts.holds[move.sender][move.name]
        part = view(whole, tuple((0, n) for n in whole.shape), held)
        target = arrived[move.receiver, move.name]
        place = view(target, tuple((0, n) for n in target.shape), move.box)
        assert bool((place == -1).all()), "sent twice"
        place.copy_(view(part, held, move.box))
        if move.sender != move.receiver:
            received[move.receiver] += move.bytes
    for (rank, name), target in arrived.items():
        wanted = torch.zeros_like(target, dtype=torch.bool)
        for box in layouts.wants[rank][name].boxes:
            view(wanted, tuple((0, n) for n in target.shape), box).fill_(True)
        assert torch.equal(target[wanted], wholes[name][wanted])
        assert bool((target[~wanted] == -1).all()), "sent, and not wanted"
    return received


def lacked(layouts: Layouts, rank: int) -> int:
    """Bytes that a rank wants and does not hold, counted element by element."""
    total = 0
    for name, want in layouts.wants[rank].items():
        points = {at for box in want.boxes for at in itertools.product(*(range(*d) for d in box))}
        held = layouts.holds.get(rank, {}).get(name)
        if held is not None:
            points -= set(itertools.product(*(range(*d) for d in held)))
        total += len(points) * want.size
    return total


@pytest.mark.parametrize("seed", range(60))
def test_of_drawn_layouts(seed: int) -> None:
    layouts, shapes = drawn_layouts(seed)
    moves = plan_moves(layouts, SLICE)
    received = run(layouts, shapes, moves)
    assert {r: received[r] for r in layouts.wants} == {r: lacked(layouts, r) for r in layouts.wants}

    demands, sent = Counter[tuple[int, ...]](), Counter[int]()
    for move in moves:
        if move.sender != move.receiver:
            assert move.bytes <= SLICE
            assert move.sender in owners_of(layouts, move)
            demands[owners_of(layouts, move)] += move.bytes
            sent[move.sender] += move.bytes
    assert max(sent.values(), default=0) <= least_fullest(demands) + SLICE


def test_is_alike_on_all_ranks() -> None:
    layouts, _ = drawn_layouts(3)

    def turned(given: Mapping[int, Any]) -> dict[int, Any]:
        return {r: dict(reversed(given[r].items())) for r in reversed(list(given))}

    other = Layouts(turned(layouts.holds), turned(layouts.wants), layouts.nodes)
    assert plan_moves(other, SLICE) == plan_moves(layouts, SLICE)


def test_bytes_go_along_chains_of_replicas() -> None:
    """Poured set by set, the last sender gets 11 and the first 6, which share no tensor: what the
    last one has goes to its neighbour, whose goes to the next."""
    demands = {(0, 1): 12, (1, 2): 12, (2, 3): 12}
    shares = levelled(demands, 1)
    load = Counter[int]()
    for senders, by in shares.items():
        assert sum(by.values()) == demands[senders] and min(by.values()) >= 0
        load.update(by)
    assert max(load.values()) <= least_fullest(demands) + 1 == 10


def test_of_two_nodes_the_near_one_sends() -> None:
    box = ((0, 8),)
    holds = {0: {"w": box}, 1: {"w": box}}
    wants = {rank: {"w": Want((box,), 4)} for rank in (2, 3)}
    moves = plan_moves(Layouts(holds, wants, {0: 0, 1: 1, 2: 1, 3: 1}), 1024)
    assert [(m.sender, m.receiver) for m in moves] == [(1, 2), (1, 3)]
    moves = plan_moves(Layouts(holds, wants, {}), 1024)
    assert {m.sender for m in moves} == {0, 1}


def test_what_nobody_holds_is_an_error() -> None:
    layouts = Layouts({0: {"w": ((0, 4),)}}, {1: {"w": Want((((0, 8),),), 4)}}, {})
    with pytest.raises(
        AutoshardError, match=r"rank 1 wants \(\(4, 8\),\) of w, which no rank holds"
    ):
        plan_moves(layouts, 64)


@pytest.mark.parametrize("seed", range(10))
def test_rounds_keep_the_order_and_the_budget(seed: int) -> None:
    moves = [m for m in plan_moves(drawn_layouts(seed)[0], SLICE) if m.sender != m.receiver]
    found = rounds(moves, 2 * SLICE)
    for group in found:
        used = Counter[int]()
        for move in group:
            used.update({move.sender: move.bytes, move.receiver: move.bytes})
        assert group and max(used.values()) <= 2 * SLICE
    for pair in {(m.sender, m.receiver) for m in moves}:
        kept = [m for group in found for m in group if (m.sender, m.receiver) == pair]
        assert kept == [m for m in moves if (m.sender, m.receiver) == pair]


def test_boxes() -> None:
    whole: Box = ((0, 4), (0, 6))
    inner: Box = ((1, 3), (2, 4))
    rest = list(without(whole, inner))
    assert sum(map(elements, rest)) == 24 - 4
    assert not any(common(a, b) for i, a in enumerate(rest) for b in rest[:i])
    assert common(inner, ((3, 4), (0, 6))) is None and list(without(inner, whole)) == []
    assert sum(map(elements, apart([inner, whole, inner]))) == 24
    assert list(slices(whole, 12)) == [((0, 2), (0, 6)), ((2, 4), (0, 6))]
    assert [elements(b) for b in slices(whole, 4)] == [4, 2] * 4
    assert list(slices((), 1)) == [()] and elements(()) == 1
