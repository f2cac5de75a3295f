"""The placement algebra: the state of a tensor on one mesh axis.

A state is a short string, so that it can be an argument of a graph node, a word in a
plan file and a label in `explain` without conversion:

    state   forward value       gradient             produced by
    R       replicated          replicated           an ordinary tensor
    V       replicated          partial (to be summed)   the input of a column-parallel linear
    P       partial             replicated           the output of a row-parallel linear
    S(d)    sharded on dim d    sharded on dim d     everything in between

A change of state converts the value, and its backward the gradient the other way. `step` says what
one conversion is, `change_steps` what a change is (the two tables of Megatron's mappings file):

    change    forward          backward          change    forward      backward
    R -> V    nothing          all-reduce        P -> R    all-reduce   nothing
    P -> S    reduce-scatter   all-gather        S -> V    all-gather   reduce-scatter
    S -> R    all-gather       slice             R -> S    slice        all-gather
    S -> S'   all-to-all       all-to-all        the rest is local
"""

from __future__ import annotations

from typing import Literal

State = str

ConversionStep = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scale", "slice", "pad"
]
"""A collective, or local work: divide by the number of ranks, take a slice, pad with zeros."""

R: State = "R"
V: State = "V"
P: State = "P"


def S(dim: int) -> State:
    """The state "sharded on dimension `dim`" (non-negative)."""
    return f"S({dim})"


def shard_dim(state: State) -> int | None:
    """The sharded dimension, or None for R, V and P."""
    return int(state[2:-1]) if state[0] == "S" else None


def forward_value(state: State) -> State:
    """What the forward value is: R, P or S(d)."""
    return R if state == V else state


def gradient_value(state: State) -> State:
    """What the gradient is: R, P or S(d)."""
    return {R: R, V: P, P: R}.get(state, state)


def step(src: State, dst: State) -> ConversionStep | None:
    """The step that turns a value in R, P or S(d) into another; None where it is there already."""
    if src == dst:
        return None
    if src == R:
        return "scale" if dst == P else "slice"
    if src == P:
        return "all_reduce" if dst == R else "reduce_scatter"
    if dst == R:
        return "all_gather"
    return "pad" if dst == P else "all_to_all"


def conversions(src: State, dst: State) -> tuple[tuple[State, State], tuple[State, State]]:
    """What a change of state converts, each in R, P or S(d): the value, and its gradient back."""
    return (
        (forward_value(src), forward_value(dst)),
        (gradient_value(dst), gradient_value(src)),
    )


def change_steps(src: State, dst: State) -> tuple[ConversionStep | None, ConversionStep | None]:
    """The steps of a change of state: (of the forward pass, of the backward pass)."""
    forward, backward = conversions(src, dst)
    return step(*forward), step(*backward)


def is_state(text: str) -> bool:
    """Whether `text` spells a state."""
    return text in (R, V, P) or (
        text.startswith("S(") and text.endswith(")") and text[2:-1].isdigit()
    )
