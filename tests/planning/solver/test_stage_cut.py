"""The search for pipeline stages against every cut of small chains."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from autoshard.planning.solver import Chain, StageCut, cut_stages

INF = float("inf")


def every_cut(
    chain: Chain, stages: int, microbatches: int, budget: float | None
) -> StageCut | None:
    """The best of all cuts, each priced from the definition."""
    n, best = len(chain.seconds), None
    for cuts in itertools.combinations(range(1, n), stages - 1):
        ends = [0, *cuts, n]
        costs, memory = [], []
        for stage, (a, b) in enumerate(itertools.pairwise(ends)):
            stored = sum(size for size, at in chain.stored if any(a <= i < b for i in at))
            update = stored * chain.update / microbatches
            own, live = sum(chain.seconds[a:b]), min(microbatches, stages - stage)
            costs.append(own + chain.sent[a] + chain.sent[b] + update)
            memory.append(stored + live * sum(chain.kept[a:b]))
            if budget is not None and memory[-1] > budget:
                for part, beside, slower in chain.again:  # the first that fits is the quickest
                    if stored + part * live * sum(chain.kept[a:b]) + beside <= budget:
                        costs[-1], memory[-1] = costs[-1] + slower * own, budget
                        break
            if any(stage not in chain.homes.get(i, (stage,)) for i in range(a, b)):
                break
        else:
            if budget is not None and max(memory) > budget:
                continue
            seconds = (microbatches - 1) * max(costs) + sum(costs)
            if seconds < (float("inf") if best is None else best.seconds - 1e-9):
                best = StageCut(cuts, max(costs), seconds, tuple(memory))
    return best


def some_chain(draw: random.Random, n: int, stages: int) -> Chain:
    sent = [0.0, *(draw.choice([1, 1, 2, 5, float("inf")]) for _ in range(n - 1)), 0.0]
    return Chain(
        seconds=[draw.randint(0, 9) for _ in range(n)],
        sent=sent,
        kept=[draw.randint(0, 4) for _ in range(n)],
        stored=[
            (draw.randint(1, 20), draw.sample(range(n), draw.randint(1, 2))) for _ in range(n // 2)
        ],
        update=draw.choice([0.0, 0.5]),
        homes={draw.randrange(n): frozenset({draw.randrange(stages)})}
        if draw.random() < 0.4
        else {},
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_what_trying_every_cut_finds(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.choice([1, 2, 3, 4])
    chain = some_chain(draw, draw.randint(stages, 10), stages)
    microbatches = draw.choice([1, 2, 8])
    budget = draw.choice([None, 30.0, 60.0])
    if draw.random() < 0.5:
        chain = replace(chain, again=((0.75, 2.0, 0.1), (0.5, 2.0, 0.2), (0.2, 5.0, 0.5)))
    found = cut_stages(chain, stages, microbatches, budget)
    expected = every_cut(chain, stages, microbatches, budget)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.seconds)
    if budget is not None:
        assert max(found.memory) <= budget


def test_the_stages_of_a_rank_share_its_budget() -> None:
    """Where each of them alone may fit. Not all that is possible is found, and nothing else."""
    possible = found = 0
    for seed in range(40):
        draw = random.Random(seed)
        chain, kept, budget = some_chain(draw, 9, 4), [3, 2, 2, 1], draw.choice([40.0, 50.0])
        alone = cut_stages(chain, 4, 4, None, kept)
        fits = False
        for cuts in itertools.combinations(range(1, 9), 3):
            fixed = replace(chain, sent=[0.0 if i in (0, *cuts, 9) else INF for i in range(10)])
            one = cut_stages(fixed, 4, 4, None, kept)
            fits |= one is not None and max(rank_bytes(one)) <= budget and alone is not None
        cut = cut_stages(chain, 2, 4, budget, kept)
        possible, found = possible + fits, found + (cut is not None)
        if cut is not None:
            assert alone is not None and fits and max(rank_bytes(cut)) <= budget
            assert cut.seconds >= alone.seconds
            assert cut == alone or max(rank_bytes(alone)) > budget
    assert found >= 10 and possible == 15


def rank_bytes(cut: StageCut) -> tuple[float, float]:
    a, b, c, d = cut.memory
    return a + c, b + d


def test_a_slower_stage_is_taken_where_it_spares_a_dear_transfer() -> None:
    chain = Chain(seconds=[4, 1, 4], sent=[0, 1, 9, 0], kept=[0] * 3)
    found = cut_stages(chain, 2, 1)
    assert found is not None and found.cuts == (1,)
