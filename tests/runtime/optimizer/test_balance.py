"""The owners of matrices: the balance beside every assignment there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from autoshard.runtime.optimizer.balance import balanced


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
