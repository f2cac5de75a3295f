"""`summed`: a parameter whose gradient is added to the sum over micro-batches as it is made.

If the backward of a stage returned its gradients, all of one micro-batch would be there beside
their sums: a stage would need its parameters' size once more.
"""

from __future__ import annotations

from typing import Any

import torch


def summed(parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The parameter; in backward its gradient is added to `total`, of its shape, and it gets none.

    Other micro-batches write to `total` between this forward and its backward: give an alias of it
    (`total.data`), which has a version counter of its own.
    """
    found: torch.Tensor = _Summed.apply(parameter, total)
    return found


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.total.add_(grad.to_dense() if grad.is_sparse else grad)
        return None, None
