"""The placement algebra: the state of a tensor on one mesh axis.

A state is a short string, so that it can be an argument of a graph node, a word in a
plan file and a label in `explain` without conversion:

    state   forward value       gradient             produced by
    I       replicated          replicated           an ordinary tensor
    R       replicated          partial (to be summed)   the input of a column-parallel linear
    P       partial             replicated           the output of a row-parallel linear
    S(d)    sharded on dim d    sharded on dim d     everything in between
    Z(d)    as S(d), the rows in head-tail order     attention by rows on cp (axis.py)

The letters are those of torch's local-SPMD types (`spmd_types`); users read `in_words`.

A change of state converts the value, and its backward the gradient the other way. `step` says what
one conversion is, `change_steps` what a change is (the two tables of Megatron's mappings file):

    change    forward          backward          change    forward      backward
    I -> R    nothing          all-reduce        P -> I    all-reduce   nothing
    P -> S    reduce-scatter   all-gather        S -> R    all-gather   reduce-scatter
    S -> I    all-gather       slice             I -> S    slice        all-gather
    S -> S'   all-to-all       all-to-all        the rest is local
"""

import re
from typing import Literal

State = str

ConversionStep = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scale", "slice", "pad"
]
"""A collective, or local work: divide by the number of ranks, take a slice, pad with zeros."""

I: State = "I"  # noqa: E741
R: State = "R"
P: State = "P"


def S(dim: int) -> State:
    """The state "sharded on dimension `dim`" (non-negative)."""
    return f"S({dim})"


def Z(dim: int) -> State:
    """The state "sharded on dimension `dim`, in head-tail order"."""
    return f"Z({dim})"


def H(rank: int) -> State:
    """The state "at home on rank `rank`" of pp, of a stored parameter: the others have no rows."""
    return f"H({rank})"


def home_rank(state: State) -> int | None:
    """The rank at which a parameter is at home, or None for another state."""
    return int(state[2:-1]) if state[0] == "H" else None


def shard_dim(state: State) -> int | None:
    """The sharded dimension, or None for I, R and P."""
    return int(state[2:-1]) if state[0] in "SZ" else None


def with_dim(state: State, dim: int) -> State:
    """A state S(d) or Z(d) of another dim: the order of the rows is kept."""
    return f"{state[0]}({dim})"


def is_head_tail(state: State) -> bool:
    """Whether the state is Z(d)."""
    return state[0] == "Z"


def placement_words(state: State) -> str:
    """The state as users read it: torch's `Replicate`, `Partial` and `Shard(d)`."""
    dim = shard_dim(state)
    if dim is not None:
        return f"Shard({dim}), head-tail" if is_head_tail(state) else f"Shard({dim})"
    if home_rank(state) is not None:
        return f"on stage {home_rank(state)}"
    return {I: "Replicate", R: "Replicate, grad Partial", P: "Partial"}[state]


def in_words(text: str) -> str:
    """A text with every state in it, such as `x: S(0) -> I`, as users read it."""
    return re.sub(r"\b([IRP]\b(?!\()|[SZ]\(\d+\))", lambda found: placement_words(found[0]), text)


def forward_value(state: State) -> State:
    """The placement of the forward value: I, P, S(d) or Z(d)."""
    return I if state == R else state


def gradient_value(state: State) -> State:
    """The placement of the gradient: I, P or S(d)."""
    return {I: I, R: P, P: I}.get(state, state)


def gradient_state(state: State) -> State:
    """The state of the gradient, which has a gradient itself where it is differentiated again."""
    return {R: P, P: R}.get(state, state)


def step(src: State, dst: State) -> ConversionStep | None:
    """The step that turns a value in I, P or S(d) into another; None where it is there already."""
    if src == dst:
        return None
    if src == I:
        return "scale" if dst == P else "slice"
    if src == P:
        return "all_reduce" if dst == I else "reduce_scatter"
    if dst == I:
        return "all_gather"
    return "pad" if dst == P else "all_to_all"


def conversions(src: State, dst: State) -> tuple[tuple[State, State], tuple[State, State]]:
    """Conversions of a change of state, in I, P and S(d): of the value, of its gradient back."""
    return ((forward_value(src), forward_value(dst)), (gradient_value(dst), gradient_value(src)))


def change_steps(src: State, dst: State) -> tuple[ConversionStep | None, ConversionStep | None]:
    """The steps of a change of state: (of the forward pass, of the backward pass)."""
    forward, backward = conversions(src, dst)
    return step(*forward), step(*backward)


def is_state(text: str) -> bool:
    """Whether `text` spells a state: one way of writing each, of a dim that a tensor may have."""
    return text in (I, R, P) or re.fullmatch(r"[SZ]\((0|[1-9][0-9]?)\)", text) is not None
