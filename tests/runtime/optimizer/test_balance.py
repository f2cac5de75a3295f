"""The owners of matrices: the balance beside every assignment there is."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.optimizer import Rates, SharedMatrix, Sharers, Work, assign_owners
from autoshard.runtime.optimizer.balance import balanced
from autoshard.runtime.optimizer.matrix_owners import Bounds, buckets_of


def longest(jobs: list[float], given: list[float], owners: Sequence[int]) -> float:
    return max(
        load + sum(j for j, o in zip(jobs, owners) if o == rank) for rank, load in enumerate(given)
    )


def shortest(jobs: list[float], given: list[float]) -> float:
    every = itertools.product(range(len(given)), repeat=len(jobs))
    return min(longest(jobs, given, owners) for owners in every)


@pytest.mark.parametrize("seed", range(20))
def test_the_balance_of_drawn_shapes_is_that_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    given = [draw.choice([0.0, 0.0, 1e-3]) for _ in range(draw.choice([2, 3, 4]))]
    sides = [64, 96, 128, 160, 256]
    shapes = [(draw.choice(sides), draw.choice(sides)) for _ in range(draw.randint(1, 7))]
    jobs = [1e-9 * n * m * min(n, m) for n, m in shapes]
    found = balanced(jobs, given)
    assert found.optimal and longest(jobs, given, found.owners) == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(shortest(jobs, given))


def test_a_balance_that_longest_first_does_not_find() -> None:
    assert balanced([3, 3, 2, 2, 2], [0, 0]) == ([0, 0, 1, 1, 1], pytest.approx(6), True)


def test_a_search_that_ends_early_says_so() -> None:
    draw = random.Random(0)
    jobs = [draw.random() for _ in range(40)]
    found = balanced(jobs, [0.0] * 7, most_nodes=100)
    assert not found.optimal and set(found.owners) == set(range(7))


def test_layers_of_a_model_are_balanced_without_a_search() -> None:
    found = balanced([4.0, 1.0, 3.0, 3.0] * 64, [0.0] * 8)
    assert found.optimal and found.seconds == pytest.approx(11 * 64 / 8)


MESHES: list[dict[str, int]] = [
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 4},
    {"tp": 3},
]


@pytest.mark.parametrize("seed", range(40))
def test_owners_get_what_they_lack_and_all_get_their_parts(seed: int) -> None:
    draw = random.Random(seed)
    sizes = draw.choice(MESHES)
    ranks, rates = math.prod(sizes.values()), Rates(1e3, 1e2, 1e1)
    axes = tuple(offline_mesh(sizes, rank).axes for rank in range(ranks))
    sharers, matrices = Sharers(tuple(range(ranks)), axes, None, None), []
    for _ in range(draw.randint(1, 4)):
        shape = torch.Size(draw.randint(1, 6) for _ in range(3))
        states = {"dp_shard": "S(0)", "tp": draw.choice(["I", "S(0)", "S(1)"])}
        flops, sent, back = draw.random() * 1e3, draw.randint(1, 2), draw.randint(0, 2)
        numel, by_rows = shape.numel(), draw.random() < 0.5
        more = {"sent": 4 * sent * numel, "returned": 4 * back * numel, "numbers": 8}
        work = Work(flops, draw.randint(0, 99), by_rows=by_rows, **more)  # type: ignore[arg-type]
        matrices.append(SharedMatrix(shape, states, sharers, work))
    pinned = [
        draw.choice([None, draw.randrange(ranks)]) if not m.work.by_rows else None for m in matrices
    ]
    most = assign_owners(matrices, pinned, rates)
    loads = [sum(m.seconds(rates) * m.share(rank) for m in matrices) for rank in range(ranks)]
    assert most == pytest.approx(max(loads))

    def cells(box: Bounds) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(low, high) for low, high in box)))

    for matrix, place in zip(matrices, pinned):
        assert place is None or matrix.owners == [place]
        parts, moved = [cells(bounds) for bounds in matrix.bounds], 0
        wholes = [cells([rows, *((0, n) for n in matrix.shape[1:])]) for rows in matrix.rows]
        ways = (matrix.there(), matrix.work.sent, parts, wholes)
        for legs, nbytes, from_, to in (ways, (matrix.back(), matrix.work.returned, wholes, parts)):
            got: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(ranks)]
            for sender, receiver, box in legs:
                assert from_[sender] >= cells(box)
                got[receiver].update(cells(box))
                moved += nbytes // matrix.shape.numel() * len(cells(box)) * (sender != receiver)
            assert got == list(map(Counter, to))  # all of it, once
        assert Counter(itertools.chain(*wholes)) == Counter(cells([(0, n) for n in matrix.shape]))
        work, first = matrix.work, next(part for part in parts if part)
        most_rows = len({i[0] for i in first}) if work.by_rows else matrix.shape[0]
        lacks = 1 - len(first) / (most_rows * matrix.shape[1:].numel())
        took = max(work.flops / 1e3, work.nbytes / 1e2) + lacks * (work.sent + work.returned) / 1e1
        assert matrix.seconds(rates) == pytest.approx(took)
        assert matrix.nbytes() == moved + 8 * len(matrix.owners) * (ranks - 1)
        for (low, high), at, part in zip(matrix.rows, matrix.bounds, parts):
            if matrix.work.by_rows and part:  # by those that have some of it, evenly
                assert high == low or at[0][0] <= low < high <= at[0][1]
                alike = [b for b, part in zip(matrix.bounds, parts) if b[0] == at[0] and part]
                assert (at[0][1] - at[0][0]) // len(alike) <= high - low
    limit = draw.choice([1, 200, 2000])
    buckets = buckets_of(matrices, limit)  # type: ignore[arg-type]
    assert Counter(map(id, sum(buckets, []))) == Counter(map(id, matrices))

    def takes(bucket: Sequence[SharedMatrix], rank: int) -> float:
        own = [m for m in bucket if rank in m.owners]
        return sum(max(m.work.sent, m.work.returned) * m.share(rank) for m in own)

    for bucket in buckets:
        for rank in range(ranks):
            alone = sum(rank in m.owners for m in bucket) <= 1
            assert alone or takes(bucket, rank) <= limit
    for bucket, after in itertools.pairwise(buckets):  # none that could have been in the one before
        each = [(takes(bucket, rank), takes(after[:1], rank)) for rank in after[0].owners]
        assert any(held and held + more > limit for held, more in each)
