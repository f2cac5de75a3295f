"""`Withheld`: an output of a training step, besides its loss, that is not at hand."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, message

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
