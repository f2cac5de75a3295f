"""Every case trains in eager, is reproducible, and holds no dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import CASES


@pytest.mark.parametrize("name", CASES)
def test_case_is_deterministic_and_differentiable(name: str) -> None:
    case = CASES[name]
    model, again = case.make_model(), case.make_model()
    assert all(m.p == 0.0 for m in model.modules() if isinstance(m, nn.Dropout))
    loss = case.loss(model, case.make_batch(0))
    loss.backward()
    assert torch.equal(loss, case.loss(again, case.make_batch(0)))
    # the second step may take another path (the branch), so both together touch everything
    second = case.loss(model, case.make_batch(1))
    second.backward()
    assert not torch.equal(loss, second)
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
