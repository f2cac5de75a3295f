"""`Withheld`: an output of a training step in a pipeline, besides its loss, that is not at hand."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, message

aten = torch.ops.aten


class Withheld(torch.Tensor):
    """A tensor of a shape, whose values are nowhere whole: to read it is an error.

    The ranks of other stages have nothing of it, and a gradient into it would come too late: the
    backward of the micro-batches is over when the call returns.
    """

    _number: int

    @staticmethod
    def __new__(cls, like: torch.Tensor, number: int) -> Withheld:
        made: Withheld = compat.wrapper_tensor(cls, tuple(like.shape), like, False)
        made._number = number
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Withheld))
        if func is aten.detach.default:
            return Withheld(given, given._number)
        raise AutoshardError(
            message(
                f"output {given._number} of the model, of shape {tuple(given.shape)}, was read: "
                "in training a pipeline keeps no output but the loss",
                remedy="Compute what needs it in the compiled model, or call the model under "
                "torch.no_grad() to have its outputs.",
            )
        )

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Withheld(output {self._number}, shape {tuple(self.shape)}, {self.dtype})"
