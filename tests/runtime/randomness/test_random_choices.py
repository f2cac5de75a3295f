"""Random integers, permutations, choices and further distributions: what is drawn, and shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.planning.rules.layers import SEED
from autoshard.planning.rules.registry import strategies
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.randomness import distributions as choices
from autoshard.runtime.randomness.draws import on_shard
from autoshard.verification.program_check import split, verify_program
from traced import programs

KEY = torch.tensor(-987654321)
T = torch.Tensor


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 33)

    def forward(self, x: T) -> T:
        h = self.wide(x)
        rows = h.flatten(0, 1)
        h = F.rrelu(h, training=True) + torch.normal(h, 2.0) + torch.normal(h, h.exp())
        h = h + torch.normal(1.0, h.exp()) + torch.randint_like(h, 5) + torch.randint(7, (33,))
        h = h + torch.empty_like(h).cauchy_(1.0, 2.0).tanh() + torch.empty_like(h).geometric_(0.3)
        h = h + torch.empty_like(h).log_normal_(0.0, 0.5) + torch.randint(3, 9, (33,))
        h = h[:, torch.randperm(8)]
        p = rows.softmax(-1)
        few, many = torch.multinomial(p, 3), torch.multinomial(p, 40, replacement=True)
        one = torch.multinomial(p, 1)
        picked = rows.gather(1, few).sum() + rows.gather(1, many).sum()
        return (h.flatten(0, 1) * one).sum() + picked


@pytest.mark.parametrize("n", [1, 2, 4])
def test_shards_choose_as_one_device_does(n: int) -> None:
    (program,), values = programs(Choosing(), (torch.randn(2, 8, 16),), [{"mesh": {"tp": n}}])
    left = [
        str(node.target)
        for node in program.serial.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target is not SEED
        and torch.Tag.nondeterministic_seeded in node.target.tags
    ]
    assert left == []
    report = verify_program(program, values)
    assert report.worst[1] < 1e-5, report.worst
    for node in program.serial.graph.nodes if n > 1 else ():
        if str(node.target).startswith("autoshard.") and node.target is not SEED:
            sharded = [s for s in strategies(node, n)[0] if str(s.output).startswith("S")]
            assert bool(sharded) == ("permutation" not in str(node.target)), node.target


OPS: dict[str, tuple[Callable[..., T], tuple[Any, ...], tuple[int, ...]]] = {
    "integers": (choices.integers, (2, 9), (0, 1)),
    "large integers": (choices.integers, (-(2**40), 2**40, 0, torch.int64), (0, 1)),
    "multinomial": (choices.multinomial, (3, False), (0,)),
    "multinomial, again and again": (choices.multinomial, (70, True), (0,)),
    "normal_around": (choices.normal_around, (2.0,), (0, 1)),
    "cauchy": (choices.cauchy, (0.0, 1.0), (0, 1)),
    "geometric": (choices.geometric, (0.2,), (0, 1)),
    "log_normal": (choices.log_normal, (0.0, 1.0), (0, 1)),
    "rrelu": (choices.rrelu, (0.1, 0.9), (0, 1)),
}


@pytest.mark.parametrize("name", OPS)
def test_a_shard_draws_the_slice(name: str) -> None:
    op, arguments, dims = OPS[name]
    arguments = arguments if len(arguments) > 2 else (*arguments, 4)
    x = torch.rand(6, 7)
    whole = op(x, KEY, *arguments)
    for dim in dims:
        for n in (2, 3, 4):
            parts = [
                on_shard(
                    local,
                    KEY,
                    *arguments,
                    op=op.__name__,
                    dim=dim,
                    extent=x.shape[dim],
                    axis=Axis("tp", n, rank, ""),
                )
                for rank, local in enumerate(split(x, f"S({dim})", n))
            ]
            torch.testing.assert_close(torch.cat(parts, dim), whole, rtol=1e-6, atol=1e-6)


def fits(counts: T, expected: T) -> bool:
    """Whether a chi-squared statistic lies within five deviations of its mean."""
    freedom = counts.numel() - 1
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


def test_integers_are_even_and_permutations_whole() -> None:
    x = torch.empty(200_000)
    drawn = choices.integers(x, KEY, -3, 61, 0, torch.int64)
    assert drawn.min() == -3 and drawn.max() == 60
    assert fits(torch.bincount(drawn + 3).double(), torch.full((64,), len(x) / 64))
    large = choices.integers(x, KEY, -(2**62), 2**62, 1, torch.int64)
    assert abs((large.double() / 2**62).mean()) < 5 / math.sqrt(3 * len(x))
    order = choices.permutation(torch.empty(1000), KEY, 0, torch.int64)
    assert torch.equal(order.sort().values, torch.arange(1000))
    firsts = [int(choices.permutation(torch.empty(4), KEY, i, torch.int64)[0]) for i in range(2000)]
    assert fits(torch.bincount(torch.tensor(firsts)).double(), torch.full((4,), 500.0))


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_follows_its_weights(replacement: bool) -> None:
    p = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0, 1.0, 0.0])
    rows = p.expand(50_000, 7)
    once = choices.multinomial(rows, KEY, 1, replacement, 0)
    counts = torch.bincount(once.flatten(), minlength=7)
    assert set(counts[[0, 3, 6]].tolist()) == {0}
    assert fits(counts[[1, 2, 4, 5]].double(), p[[1, 2, 4, 5]] / 8 * 50_000)
    if replacement:
        many = choices.multinomial(p[None], KEY, 50_000, True, 1)
        counts = torch.bincount(many.flatten(), minlength=7)
        assert set(counts[[0, 3, 6]].tolist()) == {0}
        assert fits(counts[[1, 2, 4, 5]].double(), p[[1, 2, 4, 5]] / 8 * 50_000)
    else:
        all_of_them = choices.multinomial(rows[:100], KEY, 4, False, 2)
        assert torch.equal(all_of_them.sort().values, torch.tensor([1, 2, 4, 5]).expand(100, 4))


def test_moments_of_the_distributions() -> None:
    n = 200_000
    x = torch.ones(n, dtype=torch.float64)
    trials = choices.geometric(x, KEY, 0.25, 0)
    assert trials.min() == 1 and abs(trials.mean() - 4) < 5 * math.sqrt(12 / n)
    logs = choices.log_normal(x, KEY, 1.0, 0.5, 1).log()
    assert abs(logs.mean() - 1) < 5 * 0.5 / math.sqrt(n)
    inside = ((choices.cauchy(x, KEY, 2.0, 3.0, 2) - 2).abs() < 3).double().mean()
    assert abs(inside - 0.5) < 5 * 0.5 / math.sqrt(n)
    slopes = -choices.rrelu(-x, KEY, 0.2, 0.4, 3)
    assert 0.2 <= slopes.min() and slopes.max() < 0.4
    assert torch.equal(choices.rrelu(x, KEY, 0.2, 0.4, 3), x)
    for found in (
        choices.normal_around(2 * x, KEY, 3.0, 4),
        choices.normal_scaled(3 * x, KEY, 2.0, 4),
        choices.normal_each(2 * x, 3 * x, KEY, 4),
    ):
        assert abs(found.mean() - 2) < 15 / math.sqrt(n)
        assert abs(found.std() - 3) < 15 / math.sqrt(2 * n)
