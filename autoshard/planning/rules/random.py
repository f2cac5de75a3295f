"""Random numbers that are a function of the element: every dim shards, as in elementwise operators.

The operator on a shard counts elements from the shard's place in the whole tensor (`on_shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoshard.planning.rules.call import OpCall
from autoshard.planning.rules.language import TextRule
from autoshard.planning.strategy import Strategy
from autoshard.runtime import randomness
from autoshard.runtime.collectives import I, shard_dim
from autoshard.runtime.operators import Bound

SEED = torch.ops.autoshard.random_seed.default

SEEDS = {
    SEED: Strategy((), I, randomness.shared_seed),
    torch.ops.autoshard.tracked_seeds.default: Strategy((), I, randomness.tracked_seeds),
}
"""The only way to draw each kind of seed: on every rank of the axis, at the same time."""


def counted(op: Callable[..., Any], text: str) -> Callable[[OpCall], Iterator[Strategy]]:
    """The rule `text` for an operator whose first operand has the dims of its random numbers."""
    rule = TextRule(text)

    def strategies(call: OpCall) -> Iterator[Strategy]:
        whole = call.results[0]
        for strategy in rule(call):
            output = strategy.output
            dim = shard_dim(output if isinstance(output, str) else output[0])
            if dim is None:
                yield strategy  # partial: all ranks hold, and drop, all elements
                continue
            extent = whole.shape[dim]
            fixed = extent if isinstance(extent, int) else None
            yield strategy._replace(
                impl=Bound.of(randomness.on_shard, op=op.__name__, dim=dim, extent=fixed)
            )

    return strategies


RULES = {
    "autoshard.dropout": counted(randomness.dropout, "* ..., _ -> ..."),
    "autoshard.native_dropout": counted(randomness.native_dropout, "..., _ -> ..., ..."),
    "autoshard.feature_dropout": counted(randomness.feature_dropout, "* n c X..., _ -> n c X..."),
    "autoshard.bernoulli": counted(randomness.bernoulli, "..., _ -> ..."),
    "autoshard.bernoulli_p": counted(randomness.bernoulli_p, "..., _ -> ..."),
    "autoshard.uniform": counted(randomness.uniform, "..., _ -> ..."),
    "autoshard.normal": counted(randomness.normal, "..., _ -> ..."),
    "autoshard.exponential": counted(randomness.exponential, "..., _ -> ..."),
    "autoshard.integers": counted(randomness.integers, "..., _ -> ..."),
    "autoshard.multinomial": counted(randomness.multinomial, "... K, _ -> ... N"),
    "autoshard.normal_around": counted(randomness.normal_around, "..., _ -> ..."),
    "autoshard.normal_scaled": counted(randomness.normal_scaled, "..., _ -> ..."),
    "autoshard.normal_each": counted(randomness.normal_each, "..., ..., _ -> ..."),
    "autoshard.log_normal": counted(randomness.log_normal, "..., _ -> ..."),
    "autoshard.cauchy": counted(randomness.cauchy, "..., _ -> ..."),
    "autoshard.geometric": counted(randomness.geometric, "..., _ -> ..."),
    "autoshard.rrelu": counted(randomness.rrelu, "..., _ -> ..."),
    "autoshard.attention": counted(
        randomness.attention, "... Q E, ... K E, * ... K F, ... Q K, _ -> ... Q F"
    ),
}
