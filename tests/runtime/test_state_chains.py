"""Any chain of state changes gives back the value, and its gradient (property tests)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.runtime.collectives import states
from autoshard.runtime.collectives.axis import Axis, chunk_size
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.collectives.states import (
    I,
    P,
    R,
    S,
    Z,
    forward_value,
    gradient_value,
    shard_dim,
)
from autoshard.verification.program_check import join, split


@st.composite
def chains(draw: Any) -> tuple[int, tuple[int, ...], list[str]]:
    """(ranks, shape, states): sizes are even and uneven, but leave no rank without a row."""
    n = draw(st.integers(2, 4))
    sizes = [s for s in range(1, 10) if s % n == 0 or (n - 1) * chunk_size(s, n) < s]
    shape = tuple(draw(st.lists(st.sampled_from([1, *sizes]), min_size=1, max_size=3)))
    possible = [I, R, P, *(S(d) for d, size in enumerate(shape) if size in sizes)]
    possible += [Z(d) for d, size in enumerate(shape) if size % (2 * n) == 0]
    states = draw(st.lists(st.sampled_from(possible), min_size=2, max_size=6))
    return n, shape, states


def run_chain(
    n: int, shape: tuple[int, ...], states: list[str], seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Values at the end, gradients at the start, and what both should be when joined."""
    torch.manual_seed(seed)
    whole = torch.randn(shape, dtype=torch.float64)
    gradient = torch.randn(shape, dtype=torch.float64)
    values = split(whole, forward_value(states[0]), n)
    gradients = split(gradient, gradient_value(states[-1]), n)

    def rank(axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        start = values[axis.rank].clone().requires_grad_()
        x = start
        for have, want in zip(states, states[1:]):
            dim = shard_dim(have)
            uneven = dim is not None and shape[dim] % n != 0
            x = redistribute(
                x, have, want, axis, shape[dim] if uneven and dim is not None else None
            )
        x.backward(gradients[axis.rank])
        assert start.grad is not None
        return x.detach(), start.grad

    results = run_ranks(n, rank)
    return [r[0] for r in results], [r[1] for r in results], whole, gradient


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chains(), st.integers(0, 2**16))
def test_a_chain_returns_the_value_and_the_gradient(
    chain: tuple[int, tuple[int, ...], list[str]], seed: int
) -> None:
    n, shape, states = chain
    values, gradients, whole, gradient = run_chain(n, shape, states, seed)
    torch.testing.assert_close(join_close(values, forward_value(states[-1])), whole)
    torch.testing.assert_close(join_close(gradients, gradient_value(states[0])), gradient)


def join_close(parts: list[torch.Tensor], state: str) -> torch.Tensor:
    """`join`, where ranks that hold one value may differ by rounding: each was summed once."""
    if state == I:
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0])
        return parts[0]
    return join(parts, state)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains(), st.integers(0, 2**16))
def test_forks_of_a_chain_sum_their_gradients(
    chain: tuple[int, tuple[int, ...], list[str]], seed: int
) -> None:
    """A value read in two states: its gradient is the sum of the two, as for q, k and v."""
    n, shape, (first, *others) = chain
    torch.manual_seed(seed)
    whole = torch.randn(shape, dtype=torch.float64)
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in others]
    values = split(whole, forward_value(first), n)
    shares = [split(g, gradient_value(s), n) for g, s in zip(gradients, others)]
    dim = shard_dim(first)
    extent = shape[dim] if dim is not None and shape[dim] % n else None

    def rank(axis: Axis) -> torch.Tensor:
        start = values[axis.rank].clone().requires_grad_()
        reads = [redistribute(start, first, state, axis, extent) for state in others]
        torch.autograd.backward(reads, [share[axis.rank] for share in shares])
        assert start.grad is not None
        return start.grad

    found = join_close(run_ranks(n, rank), gradient_value(first))
    torch.testing.assert_close(found, torch.stack(gradients).sum(0))


def test_the_oracle_sees_a_gradient_that_is_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    _, gradients, _, gradient = run_chain(2, (4, 4), [I, R], 0)
    torch.testing.assert_close(gradients[0], gradient)
    monkeypatch.setattr(states, "gradient_value", lambda state: I)
    _, gradients, _, gradient = run_chain(2, (4, 4), [I, R], 0)
    assert not torch.allclose(gradients[0], gradient)
