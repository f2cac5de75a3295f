"""Normalisations, convolutions, attention and recurrent layers: the text depends on the call.

Random numbers that are a function of the element: every dim shards, as in elementwise operators.

The operator on a shard counts elements from the shard's place in the whole tensor (`on_shard`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from autoshard.planning.rules.call import OpCall
from autoshard.planning.rules.language import TextRule
from autoshard.planning.sizes import Size, hint, is_one, same, seen_keys
from autoshard.planning.strategy import Strategy
from autoshard.runtime import randomness
from autoshard.runtime.collectives import I, R, S, shard_dim
from autoshard.runtime.masked_attention import masked_prefix
from autoshard.runtime.operators import (
    Bound,
    attend_to_prefix,
    attend_to_shared_head,
    with_local_groups,
)


def layer_normalized(template: str) -> Any:
    """A rule for norms over the last dims; {D} in the text stands for those dims, {A} for ones."""

    def rule(call: OpCall) -> Iterable[Strategy]:
        count = len(call["normalized_shape"])
        whole = " ".join(f"D{i}" for i in range(count))
        ones = " ".join(f"A{i}" for i in range(count))
        return TextRule(template.format(D=whole, A=ones))(call)

    return rule


_PER_CHANNEL = TextRule("B c X..., c, c, c, c -> B c X...")
_PER_SAMPLE = TextRule("b c X..., c, c, c, c -> b c X...")


def batch_normalized(call: OpCall) -> Iterable[Strategy]:
    """batch_norm: channels; the batch too where the statistics are given, not computed from it."""
    given = call.tensor("running_mean") is not None and not call["training"]
    return (_PER_SAMPLE if given else _PER_CHANNEL)(call)


def instance_normalized(call: OpCall) -> Iterable[Strategy]:
    """instance_norm: batch and channels, unless running statistics average over the batch."""
    averaged = call.tensor("running_mean") is not None and call["use_input_stats"]
    return (_PER_CHANNEL if averaged else _PER_SAMPLE)(call)


def batch_normalized_functional(call: OpCall) -> Iterator[Strategy]:
    """The functional form, which also returns the batch's and the new running statistics."""
    (tensor,), training = call.given("input"), call["training"]
    if call.fits(tensor.shape[1], f"{call.op}: channels"):
        names = ["weight", "bias", "running_mean", "running_var"]
        saved = S(0) if training else I  # empty tensors in evaluation
        states = {"input": S(1), **dict.fromkeys(names, S(0))}
        yield call.strategy(states, [S(1), saved, saved, S(0), S(0)])
    if not training and call.fits(tensor.shape[0], f"{call.op}: batch"):
        yield call.strategy({"input": S(0)}, [S(0), I, I, I, I])


def group_normalized(call: OpCall) -> Iterator[Strategy]:
    """group_norm: the batch, or the channels where whole groups stay together."""
    yield from TextRule("b C X..., C, C -> b C X...")(call)
    if call.fits(call["num_groups"], f"{call.op}: groups", even=True):
        impl = Bound.of(with_local_groups, op=call.target, position=1)
        yield call.strategy({"input": S(1), "weight": S(0), "bias": S(0)}, S(1), impl)


def convolved(*texts: str) -> Any:
    """A rule for convolutions: `texts` for groups == 1; else the batch, or whole groups."""
    ungrouped = [TextRule(text) for text in texts]
    batch = TextRule("b I X..., O J K..., O -> b O Y...")

    def rule(call: OpCall) -> Iterator[Strategy]:
        if call["groups"] == 1:
            for text in ungrouped:
                yield from text(call)
            return
        tensor, weight = call.given("input", "weight")
        batched = tensor.dim() == weight.dim()
        if batched:
            yield from batch(call)
        if call.fits(call["groups"], f"{call.op}: groups", even=True):
            channel = 1 if batched else 0
            names = [argument.name for argument in call.schema.arguments]
            impl = Bound.of(with_local_groups, op=call.target, position=names.index("groups"))
            states = {"input": S(channel), "weight": S(0), "bias": S(0)}
            yield call.strategy(states, S(channel), impl)

    return rule


_ATTENTION = TextRule("... Q E, ... K E, * ... K F, ... Q K -> ... Q F")
_ATTENTION_BY_QUERY = TextRule("... q E, ... K E, * ... K F, ... q K -> ... q F")


def attention(call: OpCall) -> Iterator[Strategy]:
    """scaled_dot_product_attention: batch and heads; query rows too.

    With is_causal the position of a query row decides what it sees: a rank attends to the keys and
    values up to its last row (on an axis cp only, see `Builder`).
    """
    if call["is_causal"]:
        call.decline(f"{call.op}: query rows of causal attention")
        yield from _ATTENTION(call)
        yield from _by_prefix(call)
    else:
        yield from _ATTENTION_BY_QUERY(call)
    yield from _shared_heads(call, call.tensor("attn_mask"))


_MASKED = TextRule("b h Q E, b h K E, * b h K F, b L M K, b L M K -> b h Q F")


def masked_attention(call: OpCall) -> Iterator[Strategy]:
    """autoshard::masked_attention: batch and heads; query rows too, as of causal attention.

    With a window most rows see as many keys, and contiguous parts are nearly alike.
    """
    yield from _MASKED(call)
    yield from _shared_heads(call, None)
    query, key = call.given("query", "key")
    window = call["window"]
    if not same(query.shape[2], key.shape[2]):
        return
    if call.fits(query.shape[2], f"{call.op}: query rows"):
        one = call.strategy({"query": S(2)}, S(2), masked_prefix)
        length, n = hint(query.shape[2]) or 1, call.n
        if window is not None:
            before = seen_keys(length - length // n, window)
            share = n * (1 - before / seen_keys(length, window))
            yield one._replace(share=share)
        else:
            yield _where_alike(one, query.shape[2], n)


def _shared_heads(call: OpCall, mask: torch.Tensor | None) -> Iterator[Strategy]:
    """Where more ranks than key heads share those: each attends to the head of its queries."""
    query, key = call.given("query", "key")
    if not call["enable_gqa"] or query.dim() != 4:
        return
    heads, shared = hint(query.shape[1]) or 0, hint(key.shape[1]) or 0
    if shared > 1 and shared < call.n and call.n % shared == 0 and heads % call.n == 0:
        by_head = mask is not None and mask.dim() == 4 and not is_one(mask.shape[1])
        states = {"query": S(1), "attn_mask": S(1) if by_head else R}
        impl = Bound.of(attend_to_shared_head, op=call.target, dim=1)
        yield call.strategy(states, S(1), impl)


def _by_prefix(call: OpCall) -> Iterator[Strategy]:
    query, key = call.given("query", "key")
    rows = query.dim() - 2
    if not same(query.shape[rows], key.shape[rows]) or call.tensor("attn_mask") is not None:
        return
    if call.fits(query.shape[rows], f"{call.op}: query rows"):
        one = call.strategy({"query": S(rows)}, S(rows), attend_to_prefix)
        yield _where_alike(one, query.shape[rows], call.n)


def _where_alike(one: Strategy, rows: Size, n: int) -> Strategy:
    """The last rank's rows see all keys, others' fewer; in head-tail order (Z) all see as many."""
    alike = isinstance(rows, int) and rows % (2 * n) == 0
    return one if alike else one._replace(share=(2 * n - 1) / n)


def recurrent(call: OpCall) -> Iterator[Strategy]:
    """lstm, gru, rnn over padded input: the batch, with every weight used as R."""
    (tensor,) = call.given("input")
    if tensor.dim() != 3:
        call.decline(f"{call.op}: no batch dim to shard")
        return
    batch = 0 if call["batch_first"] else 1
    if call.fits(tensor.shape[batch], f"{call.op}: batch"):
        hidden = [S(1)] * len(call.tensors("hx"))
        states = {"input": S(batch), "hx": hidden, "params": [R] * len(call.tensors("params"))}
        yield call.strategy(states, [S(batch), *[S(1)] * len(hidden)])


SEED = torch.ops.autoshard.random_seed.default

SEEDS = {
    SEED: Strategy((), I, randomness.shared_seed),
    torch.ops.autoshard.tracked_seeds.default: Strategy((), I, randomness.tracked_seeds),
}
"""The only way to draw each kind of seed: on every rank of the axis, at the same time."""


def counted(op: str, text: str) -> Callable[[OpCall], Iterator[Strategy]]:
    """The rule `text` for an operator whose first operand has the dims of its random numbers."""
    rule = TextRule(text)

    def strategies(call: OpCall) -> Iterator[Strategy]:
        whole = call.results[0]
        for strategy in rule(call):
            dim = shard_dim(strategy.outputs[0])
            if dim is None:
                yield strategy  # partial: all ranks hold, and drop, all elements
                continue
            extent = whole.shape[dim]
            fixed = extent if isinstance(extent, int) else None
            yield strategy._replace(
                impl=Bound.of(randomness.on_shard, op=op, dim=dim, extent=fixed)
            )

    return strategies


_AN_ELEMENT = (
    *(randomness.bernoulli, randomness.bernoulli_p, randomness.uniform, randomness.normal),
    *(randomness.exponential, randomness.integers, randomness.normal_around, randomness.rrelu),
    *(randomness.normal_scaled, randomness.log_normal, randomness.cauchy, randomness.geometric),
)
RANDOM_RULES = {
    f"autoshard.{op.__name__}": counted(op.__name__, text)
    for op, text in {
        **dict.fromkeys(_AN_ELEMENT, "..., _ -> ..."),
        randomness.dropout: "* ..., _ -> ...",
        randomness.native_dropout: "..., _ -> ..., ...",
        randomness.feature_dropout: "* n c X..., _ -> n c X...",
        randomness.multinomial: "... K, _ -> ... N",
        randomness.normal_each: "..., ..., _ -> ...",
        randomness.attention: "... Q E, ... K E, * ... K F, ... Q K, _ -> ... Q F",
    }.items()
}
