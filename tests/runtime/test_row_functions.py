"""Functions of rows of logits, which a loss by chunks applies and differentiates itself."""

from __future__ import annotations

import torch

from autoshard.runtime.operators.chunked_loss import apply


def test_a_result_that_the_derivative_reads_is_kept() -> None:
    """A chunk of logits is written over, where tanh is not the last function of it."""
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    for functions, kept in (([("mul", 2.0), ("tanh",)], True), ([("tanh",), ("mul", 2.0)], False)):
        made = apply(x.detach(), functions)
        assert made.keeps_result is kept
        want = torch.tanh(x * 2.0) if kept else torch.tanh(x) * 2.0
        (wanted,) = torch.autograd.grad(want.sum(), x)
        torch.testing.assert_close(made.pull(torch.ones_like(x)), wanted)
