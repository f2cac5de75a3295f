"""The placement algebra: the state of a tensor on one mesh axis.

A state is a short string, so that it can be an argument of a graph node, a word in a
plan file and a label in `explain` without conversion:

    state   forward value       gradient             produced by
    R       replicated          replicated           an ordinary tensor
    V       replicated          partial (to be summed)   the input of a column-parallel linear
    P       partial             replicated           the output of a row-parallel linear
    S(d)    sharded on dim d    sharded on dim d     everything in between
"""

from __future__ import annotations

State = str

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


def is_state(text: str) -> bool:
    """Whether `text` spells a state."""
    return text in (R, V, P) or (
        text.startswith("S(") and text.endswith(")") and text[2:-1].isdigit()
    )
