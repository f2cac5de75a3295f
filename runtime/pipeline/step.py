"""A call of a pipeline: the whole schedule, and a loss whose backward hands out the gradients.

The gradient of a scalar loss is linear in what arrives at its `backward()`: that of 1 is computed
in the call, micro-batch by micro-batch, and scaled when it is asked for. Outputs besides the loss
are not at hand (`Withheld`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, all_gather
from autoshard.runtime.errors import AutoshardError, message

Gradients = Sequence[torch.Tensor | None]


def step_loss(
    run: Callable[[], tuple[torch.Tensor, Gradients]],
    parameters: Sequence[torch.Tensor],
    together: Axis | None = None,
) -> torch.Tensor:
    """The loss that `run` returns, whose backward gives the parameters the gradients it returns.

    together: the axis whose ranks have made gradients of each other's losses.
    """
    loss: torch.Tensor = compat.apply(_Step, run, together, *parameters)
    return loss


def without_loss(outputs: Sequence[Any], parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Outputs of a call that has no scalar loss: to differentiate them is an error."""
    return [
        compat.apply(_NoLoss, x, *parameters)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in outputs
    ]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, run: Any, together: Axis | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        loss, ctx.gradients = run()
        ctx.together = together
        ctx.graded = [p.requires_grad for p in parameters]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise AutoshardError(
                message(
                    "a second backward through one call of a pipeline",
                    remedy="Call the model again, or sum the losses and call backward once.",
                )
            )
        left, ctx.gradients = list(ctx.gradients), None
        if torch.is_grad_enabled() and grad.requires_grad:
            raise AutoshardError(
                message(
                    "a second derivative (create_graph=True) through a pipeline",
                    remedy="Leave pp out of the mesh.",
                )
            )
        if ctx.together is not None:
            _same_on(ctx.together, grad)
        scaled: list[torch.Tensor | None] = []
        for i, graded in enumerate(ctx.graded):
            own, left[i] = left[i], None  # freed one by one
            scaled.append(None if own is None or not graded else own * grad.to(own.device))
        return None, None, *scaled


def _same_on(axis: Axis, grad: torch.Tensor) -> None:
    """Raise on all ranks of the axis where another gradient arrives at the loss of one of them."""
    arrived = all_gather(grad.reshape(1), axis)
    if not bool(((arrived == arrived[0]) | arrived.isnan()).all()):
        said = ", ".join(f"{each:g}" for each in arrived.tolist())
        raise AutoshardError(
            message(
                f"the ranks of {axis.name} weigh their losses differently ({said}) on a mesh with "
                "pp, which computes the gradient of an expert, of the rows of all of them, before "
                "it is known",
                remedy="Scale the loss inside of the compiled model, or alike on all ranks of "
                f"{axis.name}.",
            )
        )


class _NoLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise AutoshardError(
            message(
                "a gradient arrived at an output of a pipeline that is no loss: the model returns "
                "no scalar, so the call ran its forward only",
                remedy="Compute the loss in the compiled model, and return it.",
            )
        )


aten = torch.ops.aten


# Of these no value is read: loops cast, detach and move all outputs, whichever they use.
_PASSED_ON = (
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
)
_REASON = "in training a pipeline keeps no output but the loss"
_REMEDY = (
    "Compute what needs it in the compiled model, or call the model under torch.no_grad() to have "
    "its outputs."
)


class Withheld(torch.Tensor):
    """A tensor of a shape, whose values are nowhere whole: to read it is an error, which says why.
    A copy of it, in another dtype too, is one more.

    In a pipeline the ranks of other stages have nothing of it, and a gradient into it would come
    too late: the backward of the micro-batches is over when the call returns.
    """

    _told: tuple[int, str, str]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, number: int, reason: str = _REASON, remedy: str = _REMEDY
    ) -> Withheld:
        made: Withheld = compat.wrapper_tensor(cls, tuple(like.shape), like, False)
        made._told = (number, reason, remedy)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Withheld))
        if func in _PASSED_ON:
            dtype = (kwargs or {}).get("dtype") or given.dtype
            return Withheld(torch.empty(given.shape, dtype=dtype, device="meta"), *given._told)
        number, reason, remedy = given._told
        raise AutoshardError(
            message(
                f"output {number} of the model, of shape {tuple(given.shape)}, was read: {reason}",
                remedy=remedy,
            )
        )

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Withheld(output {self._told[0]}, shape {tuple(self.shape)}, {self.dtype})"
