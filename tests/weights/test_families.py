"""By plan, for every family and six pairs of meshes: each rank is sent what it lacks, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch

from autoshard.runtime.collectives import H, I, S, data_states
from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.parameters import local_bounds
from autoshard.weights.boxes import Box, view
from autoshard.weights.moves import Layouts, Want, plan_moves
from families import FAMILIES

Sizes = dict[str, int]

#: (trains on, generates on, ranks that do both): disjoint worlds, some shared, all the same.
PAIRS: list[tuple[Sizes, Sizes, int]] = [
    ({"dp_shard": 2}, {"tp": 2}, 0),
    ({"dp_shard": 4}, {"tp": 2}, 2),
    ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, 4),
    ({"pp": 2, "dp_shard": 2}, {"tp": 4}, 0),
    ({"dp_shard": 2, "ep": 2}, {"tp": 3}, 1),
    ({"dp_replicate": 2, "cp": 2, "tp": 2}, {}, 1),  # to one whole model
]


def stored(shapes: Mapping[str, tuple[int, ...]], sizes: Sizes) -> dict[int, dict[str, Box]]:
    """What each rank of a mesh stores: by the rules of storage, on tp columns, rows or whole in
    turn, and of stages one after the other."""
    count = torch.tensor(list(sizes.values())).prod().item() if sizes else 1
    found: dict[int, dict[str, Box]] = {}
    for rank in range(int(count)):
        axes = offline_mesh(sizes, rank).axes
        found[rank] = {}
        for number, (name, shape) in enumerate(shapes.items()):
            states = data_states(len(shape), axes)
            turn = number % 3
            states["tp"] = S(turn) if turn < min(len(shape), 2) else I
            states["pp"] = H(number * 2 // len(shapes)) if shape else I
            found[rank][name] = tuple(local_bounds(shape, states, axes))
    return found


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_received_are_bytes_lacked(family: str) -> None:
    model = FAMILIES[family].make()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for trains, generates, shared in PAIRS:
        holds, targets = stored(shapes, trains), stored(shapes, generates)
        first = len(holds) - shared
        wants = {
            first + rank: {name: Want((box,), 2) for name, box in boxes.items()}
            for rank, boxes in targets.items()
        }
        layouts = Layouts(holds, wants, {})
        received, lacked = Counter[int](), Counter[int]()
        marks = {
            (rank, name): torch.zeros(shapes[name], dtype=torch.int8)
            for rank, boxes in wants.items()
            for name in boxes
        }
        for move in plan_moves(layouts, 1 << 12):
            view(marks[move.receiver, move.name], whole(shapes[move.name]), move.box).add_(1)
            if move.sender != move.receiver:
                assert move.bytes <= 1 << 12
                received[move.receiver] += move.bytes
        for (rank, name), mark in marks.items():
            expected = torch.zeros_like(mark)
            view(expected, whole(shapes[name]), targets[rank - first][name]).fill_(1)
            assert torch.equal(mark, expected), f"{name} on rank {rank}"
            if rank in holds:
                view(expected, whole(shapes[name]), holds[rank][name]).fill_(0)
            lacked[rank] += 2 * int(expected.sum(dtype=torch.int64))
        assert received == lacked and sum(lacked.values()) > 0
