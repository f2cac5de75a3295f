"""Random numbers that are a function of the element: every dim shards, as in elementwise operators.

The operator on a shard counts elements from the shard's place in the whole tensor (`on_shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoshard.planning.call import Call
from autoshard.planning.rule_language import TextRule
from autoshard.planning.strategy import Strategy
from autoshard.runtime import random_choices, random_ops
from autoshard.runtime.bound import Bound
from autoshard.runtime.placement import R, shard_dim

SEED = torch.ops.autoshard.random_seed.default

SEEDS = {
    SEED: Strategy((), R, random_ops.shared_seed),
    torch.ops.autoshard.tracked_seeds.default: Strategy((), R, random_ops.tracked_seeds),
}
"""The only way to draw each kind of seed: on every rank of the axis, at the same time."""


def counted(op: Callable[..., Any], text: str) -> Callable[[Call], Iterator[Strategy]]:
    """The rule `text` for an operator whose first operand has the dims of its random numbers."""
    rule = TextRule(text)

    def strategies(call: Call) -> Iterator[Strategy]:
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
                impl=Bound.of(random_ops.on_shard, op=op.__name__, dim=dim, extent=fixed)
            )

    return strategies


RULES = {
    "autoshard.dropout": counted(random_ops.dropout, "* ..., _ -> ..."),
    "autoshard.native_dropout": counted(random_ops.native_dropout, "..., _ -> ..., ..."),
    "autoshard.feature_dropout": counted(random_ops.feature_dropout, "* n c X..., _ -> n c X..."),
    "autoshard.bernoulli": counted(random_ops.bernoulli, "..., _ -> ..."),
    "autoshard.bernoulli_p": counted(random_ops.bernoulli_p, "..., _ -> ..."),
    "autoshard.uniform": counted(random_ops.uniform, "..., _ -> ..."),
    "autoshard.normal": counted(random_ops.normal, "..., _ -> ..."),
    "autoshard.exponential": counted(random_ops.exponential, "..., _ -> ..."),
    "autoshard.integers": counted(random_choices.integers, "..., _ -> ..."),
    "autoshard.multinomial": counted(random_choices.multinomial, "... K, _ -> ... N"),
    "autoshard.normal_around": counted(random_choices.normal_around, "..., _ -> ..."),
    "autoshard.normal_scaled": counted(random_choices.normal_scaled, "..., _ -> ..."),
    "autoshard.normal_each": counted(random_choices.normal_each, "..., ..., _ -> ..."),
    "autoshard.log_normal": counted(random_choices.log_normal, "..., _ -> ..."),
    "autoshard.cauchy": counted(random_choices.cauchy, "..., _ -> ..."),
    "autoshard.geometric": counted(random_choices.geometric, "..., _ -> ..."),
    "autoshard.rrelu": counted(random_choices.rrelu, "..., _ -> ..."),
    "autoshard.attention": counted(
        random_ops.attention, "... Q E, ... K E, * ... K F, ... Q K, _ -> ... Q F"
    ),
}
