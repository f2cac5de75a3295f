"""What is kept and what is computed again: against all choices, on small random graphs."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from torch import fx

from autoshard.planning.estimate import recomputation
from autoshard.planning.estimate.frontiers import Frontier
from autoshard.planning.estimate.recomputable import RankValue
from autoshard.planning.estimate.recomputation import Choices, Fate, as_fates, merged, segments_of
from autoshard.planning.solver.cuts import UNCUT, minimum_cut


def values(rng: random.Random, count: int, regions: bool = False) -> list[RankValue]:
    graph = fx.Graph()
    found = []
    for i in range(count):
        sources = sorted(rng.sample(range(i), min(i, rng.randint(0, 2))))
        found.append(
            RankValue(
                key=(graph.placeholder(f"v{i}"), "I"),
                nbytes=rng.randint(1, 20) * 1000,
                inner=rng.choice([0, 0, 0, 3000]),
                seconds=rng.choice([0.0, rng.randint(1, 50) * 1e-6]),
                sources=tuple(sources),
                needed=rng.random() < 0.5,
                once=not sources and rng.random() < 0.3,
                again=rng.choice([-1, -1, 0]) if regions else -1,
                held=True,
                transfer=rng.choice([math.inf, rng.randint(1, 50) * 1e-6]),
            )
        )
    return found


def cost(
    given: list[RankValue],
    choices: Choices,
    fates: tuple[Fate, ...],
    price: float,
    charge: float = math.inf,
) -> float:
    """Seconds of a choice, its bytes at the price and its transfers at the charge; infinite where
    it is none."""
    total = 0.0
    for i, (one, fate) in enumerate(zip(given, fates)):
        stays = one.once or choices.crosses[i]
        region = one.again >= 0 and not stays
        if one.needed and fate is Fate.UNREAD:
            return float("inf")
        if fate is Fate.AGAIN:
            if stays or any(fates[source] is Fate.UNREAD for source in one.sources):
                return float("inf")
            total += 0.0 if region else one.seconds
        else:
            total += 0.0 if region else one.inner * price
            if fate is Fate.KEPT:
                total += float("inf") if region else one.nbytes * price
            if fate is Fate.HOST:
                total += float("inf") if region else one.transfer * charge
    return total


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_for_a_price_is_the_cheapest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    given = values(rng, 7, regions=seed % 3 == 0)
    last = rng.randint(3, 7)
    segments = [0 if i < last else 1 for i in range(7)]
    choices = Choices(given, segments)
    for price in (1e-16, 1e-8, 1e-9, 1e-10):  # those between, from what is known on both sides
        found = tuple(as_fates(choices.fates(price, price, math.inf)))
        three = (Fate.UNREAD, Fate.KEPT, Fate.AGAIN)
        best = min(
            cost(given, choices, every, price) for every in itertools.product(three, repeat=7)
        )
        assert cost(given, choices, found, price) == pytest.approx(best, rel=1e-6, abs=1e-14)


@pytest.mark.parametrize("seed", range(12))
def test_with_the_host_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    rng = random.Random(100 + seed)
    given = values(rng, 6, regions=seed % 3 == 0)
    after = replace(given[0], sources=(), needed=False)  # in the last segment nothing is sent
    choices = Choices([*given, after], [0, 0, 0, 1, 1, 1, 2])
    for price, charge in ((1e-10, 0.0), (1e-9, 0.04), (1e-9, 0.3), (1e-8, 1.0)):
        found = tuple(as_fates(choices.fates(price, price, charge)))[:6]
        best = min(
            cost(given, choices, every, price, charge)
            for every in itertools.product(Fate, repeat=6)
        )
        assert cost(given, choices, found, price, charge) == pytest.approx(
            best, rel=1e-6, abs=1e-14
        )


def test_the_host_takes_what_the_compute_hides() -> None:
    """A fast link to the host leaves nothing to compute again; a slow one takes what it can; the
    bytes that may lie there are kept to."""
    given = layers(8)
    fast = Frontier([replace(one, transfer=1e-8) for one in given], 10**6)
    alone = Frontier(given)
    assert fast.points[-1].seconds < 0.05 * alone.points[-1].seconds
    assert fast.points[-1].kept < alone.points[-1].kept
    one = fast.recomputation(len(fast.points) - 1)
    assert not one.again and one.sent and one.host == fast.points[-1].host
    assert 0 <= one.bound <= one.seconds
    slow = Frontier([replace(one, transfer=one.nbytes * 8e-9) for one in given], 10**6)
    for point in alone.points:
        index = slow.cheapest(point.peak)
        assert index is not None and slow.points[index].seconds <= point.seconds + 1e-12
    assert any(one.again and one.sent for one in map(slow.recomputation, range(len(slow.points))))
    few = Frontier([replace(one, transfer=1e-8) for one in given], 2000)
    assert 0 < max(point.host for point in few.points) <= 2000
    assert few.points[-1].seconds > fast.points[-1].seconds
    for found in (fast, slow, few):
        for index, point in enumerate(found.points):
            assert found.recomputation(index).bound <= point.seconds + 1e-12


def test_equal_layers_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cuts that are made do not depend on the depth."""
    made, cut = [], mock.Mock(side_effect=recomputation.minimum_cut)
    monkeypatch.setattr(recomputation, "minimum_cut", cut)
    for count in (8, 64):
        given = [replace(one, transfer=one.nbytes * 8e-9) for one in layers(count)]
        choices = Choices(given, segments_of(given))
        for price in (1e-10, 1e-9, 1e-8):
            choices.fates(price, 1e-16, 0.1)
        made.append(cut.call_count)
    assert made[1] == 2 * made[0] > 0


def layers_with_hubs(rng: random.Random, depth: int) -> list[RankValue]:
    """Equal drawn layers that read some of the same first values, which nobody else does."""
    hubs = [replace(one, once=True, needed=False, sources=()) for one in values(rng, 3)]
    layer = values(rng, 5)
    reads = {(rng.randrange(4), hub) for hub in range(3) for _ in range(2)}
    found, graph = list(hubs), fx.Graph()
    for number in range(depth):
        start = len(found)
        for i, one in enumerate(layer):
            own = [start + source for source in one.sources]
            shared = [hub for at, hub in sorted(reads) if at == i]
            before = [start - 1] if i == 0 and number else []  # the last that the layer before made
            key = graph.placeholder(f"layer{number}_{i}"), "I"
            found.append(replace(one, key=key, sources=(*shared, *before, *own), once=False))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_layers_that_read_the_same_values_are_cut_as_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all were in one cut; whose size does not depend on the depth."""
    sizes = set()
    for depth in (8, 16):
        given = layers_with_hubs(random.Random(seed), depth)
        segments = [0, 0, 0, *(1 + number for number in range(depth) for _ in range(5))]
        cut = mock.Mock(side_effect=minimum_cut)
        monkeypatch.setattr(recomputation, "minimum_cut", cut)
        monkeypatch.setattr(recomputation, "_NEIGHBOURS", 3)
        alike = Choices(given, segments)
        monkeypatch.setattr(recomputation, "_NEIGHBOURS", math.inf)
        whole = Choices(given, segments)
        for price, charge in ((1e-10, math.inf), (1e-9, math.inf), (1e-8, math.inf), (1e-9, 0.3)):
            cut.reset_mock()
            found = alike.fates(price, price, charge)
            sizes.add((depth, max(call.args[0] for call in cut.call_args_list)))
            assert np.array_equal(found, whole.fates(price, price, charge))
    assert len({size for _, size in sizes}) == 1


def cut_size(edges: list[tuple[int, int, int]], sink_side: list[bool]) -> int:
    return sum(c for a, b, c in edges if sink_side[b] and not sink_side[a])


@pytest.mark.parametrize("seed", range(25))
def test_minimum_cut(seed: int) -> None:
    rng = random.Random(seed)
    edges = [(rng.randrange(7), rng.randrange(7), rng.randint(0, 9)) for _ in range(18)]
    edges = [(a, b, c) for a, b, c in edges if a != b and b != 0 and a != 6]
    found = minimum_cut(7, edges, 0, 6)
    every = [
        cut_size(edges, [False, *inner, True])
        for inner in itertools.product([False, True], repeat=5)
    ]
    assert not found[0] and found[6] and cut_size(edges, found) == min(every)
    assert found == minimum_cut(7, edges[::-1], 0, 6)


def test_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="may not be cut"):
        minimum_cut(3, [(0, 1, UNCUT), (1, 2, UNCUT)], 0, 2)


LAYER = (("wide", 400, 3e-6), ("wider", 800, 1e-6), ("out", 100, 2e-6))


def layers(count: int) -> list[RankValue]:
    """Equal layers: a wide value and a narrow one, which the next layer reads."""
    graph = fx.Graph()
    found: list[RankValue] = []
    for i in range(count):
        for name, nbytes, seconds in (
            ("wide", 400, 3e-6),
            ("wider", 800, 1e-6),
            ("out", 100, 2e-6),
        ):
            found.append(
                RankValue(
                    key=(graph.placeholder(f"{name}{i}"), "I"),
                    nbytes=nbytes,
                    inner=0,
                    seconds=seconds,
                    sources=(len(found) - 1,) if found else (),
                    needed=True,
                    once=False,
                    again=-1,
                    held=True,
                )
            )
    return found


def test_segments_are_layers_and_the_last_stays_alone() -> None:
    given = layers(4)
    assert segments_of(given) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert merged(segments_of(given), 2) == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_frontier_spends_time_for_memory_and_knows_what_it_could_not_save() -> None:
    found = Frontier(layers(8))
    with mock.patch.object(recomputation, "minimum_cut", wraps=minimum_cut) as cuts:
        assert found.free.kept == sum(nbytes for _, nbytes, _ in found.kept())
        assert cuts.call_count <= 4, "at one price: equal layers and the last, of each length"
    assert found.points[0] == found.free and found.free.seconds == 0
    assert found.points[0].peak == 8 * 1300
    pairs = list(itertools.pairwise(found.points))
    assert all(a.seconds < b.seconds and a.peak > b.peak for a, b in pairs)
    assert len(found.points) > 8, "one layer after another, not all at once"
    # all layers but the last keep what they hand on; what the worst computes again is there once
    assert found.points[-1].kept == 7 * 100 + 1300
    for index, point in enumerate(found.points):
        one = found.recomputation(index)
        assert 0 <= one.bound <= one.seconds + 1e-12
        assert one.kept == point.kept and one.spared == found.points[0].kept - point.kept
        again = [v for v in found.values if f"{v.key[0].name} I" in one.again]
        assert sum(v.seconds for v in again) == pytest.approx(one.seconds)
    assert found.cheapest(8 * 1300) == 0 and found.cheapest(100) is None
