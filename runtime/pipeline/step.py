"""A call of a pipeline in autograd: of a loss, whose gradients are there, or of outputs, whose
backwards are to come.

The gradient of a scalar loss is linear in what arrives at its `backward()`: that of 1 is computed
in the call, micro-batch by micro-batch, and scaled when it is asked for. Of other outputs nothing
is known before their gradients arrive: then the backwards of all micro-batches run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, all_gather
from autoshard.runtime.errors import AutoshardError, in_one_batch
from autoshard.runtime.lazy_gather import LazyGather

Gradients = Sequence[torch.Tensor | None]


def step_loss(
    loss: torch.Tensor,
    gradients: Gradients,
    parameters: Sequence[torch.Tensor],
    together: Axis | None = None,
) -> torch.Tensor:
    """A loss whose backward gives the parameters these gradients.

    together: the axis whose ranks have made gradients of each other's losses.
    """
    found: torch.Tensor = compat.apply(_Step, (loss, gradients), together, *parameters)
    return found


def beside_loss(
    output: LazyGather, number: int, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """An output of a call whose backwards are done: to differentiate it is an error."""
    trained = next(p for p in parameters if p.requires_grad)
    found: torch.Tensor = compat.apply(_BesideLoss, output, number, trained)
    return found


def awaiting_gradients(
    outputs: Mapping[int, LazyGather],
    backward: Callable[[Mapping[int, torch.Tensor]], Gradients],
    region: Callable[[], AbstractContextManager[Any]],
    parameters: Sequence[torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Outputs of a call, by their position, that are differentiated. backward: the gradients of the
    parameters, of those of the outputs that have one; it runs inside `region()`."""
    made = compat.apply(_Outputs, outputs, backward, region, *parameters)
    return dict(zip(outputs, made))


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, made: Any, together: Axis | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        loss, ctx.gradients = made
        ctx.together = together
        ctx.graded = [p.requires_grad for p in parameters]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        _refuse_twice(ctx.gradients, [grad])
        left, ctx.gradients = list(ctx.gradients), None
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
            f"the ranks of {axis.name} weigh their losses differently ({said}) on a mesh with "
            "pp, which computes the gradient of an expert, of the rows of all of them, before "
            "it is known",
            remedy="Scale the loss inside of the compiled model, or alike on all ranks of "
            f"{axis.name}.",
        )


def _refuse_twice(left: Any, arrived: Sequence[torch.Tensor | None]) -> None:
    """Raise for a backward of a call that has had one, for one that is to be differentiated, and
    for one of several gradients at once."""
    if any(x is not None and compat.in_one_batch(x) for x in arrived):
        raise in_one_batch("a pipeline")
    if left is None:
        raise AutoshardError(
            "a second backward through one call of a pipeline",
            remedy="Call the model again, or sum the losses and call backward once.",
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrived):
        raise AutoshardError(
            "a second derivative (create_graph=True) through a pipeline",
            remedy="Leave pp out of the mesh.",
        )


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        outputs: Mapping[int, LazyGather],
        backward: Any,
        region: Any,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.positions, ctx.call, ctx.region = list(outputs), backward, region
        return tuple(LazyGather(x._value, x.shape, False) for x in outputs.values())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        _refuse_twice(ctx.call, grads)
        call, ctx.call = ctx.call, None
        arrived = {
            at: grad.full_tensor() if isinstance(grad, LazyGather) else grad
            for at, grad in zip(ctx.positions, grads)
            if grad is not None
        }
        with ctx.region():
            return None, None, None, *call(arrived)


class _BesideLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, output: LazyGather, number: int, trained: torch.Tensor
    ) -> torch.Tensor:
        ctx.number = number
        return LazyGather(output._value, output.shape, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise AutoshardError(
            f"a gradient arrived at output {ctx.number} of a pipeline, beside the loss that it "
            "returns too, whose backwards the call has run already (what it writes to an input "
            "counts as an output, after those it returns)",
            remedy="Use options={'pipeline': {'schedule': 'gpipe'}}, whose backwards run when "
            "gradients arrive, compute the whole loss in the compiled model, or detach the "
            "output.",
        )


aten = torch.ops.aten


# Of these no value is read: loops cast, detach and move all outputs, whichever they use.
_PASSED_ON = (
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
)
_REASON = (
    "with the others beside the loss it is more than a pipeline keeps of them in training: 1 GiB, "
    "or a 50th of a memory budget"
)
_REMEDY = (
    "Compute what needs it in the compiled model, call the model under torch.no_grad() to have its "
    "outputs, or use options={'pipeline': {'schedule': 'gpipe'}}, which keeps them all."
)


class Withheld(torch.Tensor):
    """A tensor of a shape, whose values are nowhere whole: to read it is an error, which says why.
    A copy of it, in another dtype too, is one more."""

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
            f"output {number} of the model, of shape {tuple(given.shape)}, was read: {reason}",
            remedy=remedy,
        )

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Withheld(output {self._told[0]}, shape {tuple(self.shape)}, {self.dtype})"
