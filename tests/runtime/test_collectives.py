"""Every state change returns the value and the gradient, on ranks run in lockstep."""

from __future__ import annotations

import itertools

import pytest
import torch

from autoshard.runtime.collectives.axis import Axis, chunk_bounds, head_tail, in_order
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.collectives.states import (
    I,
    P,
    R,
    S,
    State,
    Z,
    forward_value,
    gradient_value,
    is_head_tail,
    shard_dim,
)

STATES = [I, R, P, S(0), S(1), S(2)]


def parts(x: torch.Tensor, kind: State, n: int, seed: int = 7) -> list[torch.Tensor]:
    """The local values of `x` on n ranks in I, P or S(d)."""
    if kind == I:
        return [x.clone() for _ in range(n)]
    if kind == P:
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(n - 1)]
        return [*noise, x - sum(noise)] if noise else [x]
    dim = shard_dim(kind)
    assert dim is not None
    x = head_tail(x, dim, n) if is_head_tail(kind) else x
    bounds = [chunk_bounds(x.shape[dim], Axis("tp", n, rank, "")) for rank in range(n)]
    return [x.narrow(dim, start, length).clone() for start, length in bounds]


def whole(locals_: list[torch.Tensor], kind: State) -> torch.Tensor:
    """The inverse of `parts`; for I every rank must hold the same."""
    if kind == I:
        for other in locals_[1:]:
            torch.testing.assert_close(other, locals_[0], rtol=0, atol=0)
        return locals_[0]
    if kind == P:
        return torch.stack(locals_).sum(0)
    dim = shard_dim(kind)
    assert dim is not None
    x = torch.cat(locals_, dim)
    return in_order(x, dim, len(locals_)) if is_head_tail(kind) else x


@pytest.mark.parametrize("shape", [(4, 8, 4), (5, 7, 9)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("n", "dtype"), [(2, torch.float64), (4, torch.float64), (2, torch.complex128)]
)
def test_every_pair_returns_value_gradient_and_second_derivative(
    n: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, dtype=dtype)
    grad = torch.randn(shape, dtype=dtype)
    states = [*STATES, Z(1)] if shape[1] % (2 * n) == 0 else STATES
    for src, dst in itertools.product(states, states):
        xs = parts(x, forward_value(src), n)
        grads = parts(grad, gradient_value(dst), n, seed=8)
        dim = shard_dim(src)
        extent = shape[dim] if dim is not None and shape[dim] % n else None

        def rank(axis: Axis, xs=xs, grads=grads, src=src, dst=dst, extent=extent):
            leaf = xs[axis.rank].detach().requires_grad_()
            given = grads[axis.rank].requires_grad_()
            out = redistribute(leaf, src, dst, axis, extent)
            (back,) = torch.autograd.grad(out, leaf, given, create_graph=True)
            # the derivative of the backward with respect to what it was given: the change itself
            (again,) = torch.autograd.grad(back, given, xs[axis.rank])
            return out.detach(), back.detach(), again

        results = run_ranks(n, rank)
        for i, name, state, wanted in (
            (0, "value", forward_value(dst), x),
            (1, "gradient", gradient_value(src), grad),
            (2, "second derivative", forward_value(dst), x),
        ):
            label = f"{src} -> {dst} {name}"
            got = whole([result[i] for result in results], state)
            torch.testing.assert_close(got, wanted, msg=lambda m, label=label: f"{label}: {m}")


def test_a_failing_rank_fails_all_and_hangs_none() -> None:
    def rank(axis: Axis) -> torch.Tensor:
        if axis.rank == 1:
            raise ValueError("rank 1 is out of memory")
        return redistribute(torch.ones(4), P, I, axis)

    with pytest.raises(ValueError, match="rank 1 is out of memory"):
        run_ranks(2, rank)


def test_ranks_that_run_different_collectives_are_told() -> None:
    def rank(axis: Axis) -> torch.Tensor:
        return redistribute(torch.ones(4), P, I if axis.rank else S(0), axis)

    with pytest.raises(RuntimeError, match="ranks disagree on the collective"):
        run_ranks(2, rank)


def test_a_rank_to_which_no_row_travels_has_a_row_of_zeros() -> None:
    """Kernels of GPUs take no tensor without rows."""

    def rank(axis: Axis) -> torch.Tensor:
        counts = torch.tensor([[2, 0], [2, 2]] if axis.rank == 0 else [[2, 0], [0, 0]])
        sent = torch.full((2, 3), float(axis.rank + 1))
        return torch.ops.autoshard.dispatch_rows(sent, counts, 2, axis.rank, axis.group)

    first, second = run_ranks(2, rank)
    assert first.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert second.tolist() == [[0.0] * 3]
