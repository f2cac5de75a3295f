"""What autoshard knows of a parameter, in one attribute of it, and its gradients that wait."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.parameters.data_unsharding import ACCUMULATE, ParameterPolicy


class Pending:
    """The unreduced gradient of one parameter.

    It exists from the first accumulating forward to the end of the backward that reduces it, and
    as long as a graph that will write to it waits for its backward.
    """

    def __init__(self) -> None:
        self.sum: torch.Tensor | None = None
        self.dirty = False
        self._last: weakref.ref[torch.Tensor] | None = None

    def __reduce__(self) -> Any:
        return Pending, ()  # a copy of the model starts with none

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer; zeros where there is none."""
        if self.sum is None and self._last is not None:
            self.sum = self._last()
        if self.sum is None:
            self.sum = torch.zeros(tuple(shape), dtype=dtype, device=device)
            self._last = weakref.ref(self.sum)
        return self.sum

    def clear(self) -> None:
        """Forget the sum, also for graphs that wait for their backward."""
        if self.sum is not None:
            self.sum.zero_()
        self.sum, self.dirty = None, False

    def finished(self, buffer: torch.Tensor, microbatch: str) -> None:
        """Record that a backward has written to `buffer`."""
        self.dirty = microbatch == ACCUMULATE
        self.sum = buffer if self.dirty else None


_RECORD = "_autoshard"


@dataclasses.dataclass(frozen=True)
class ParameterRecord:
    """Attribute `_autoshard` of a parameter, which moves with it when it is stored.

    policy: how it is gathered and reduced; None until that is said. pending: its gradients that
    wait. planned: whether a graph has decided where it lives; else it is stored somewhere to wait
    for one. choice: what was decided for it on dp_shard (`CHOICES`); later graphs obey, so that
    ranks gather alike whatever the shapes of their batches; "": nothing.
    """

    policy: ParameterPolicy | None = None
    pending: Pending | None = None
    planned: bool = True
    choice: str = ""


def policy_of(parameter: torch.Tensor) -> ParameterPolicy:
    """The policy of a parameter; the default where none was set."""
    return _record(parameter).policy or ParameterPolicy()


def has_policy(parameter: torch.Tensor) -> bool:
    """Whether `set_policy` has been called for the parameter."""
    return _record(parameter).policy is not None


def set_policy(parameters: Iterable[torch.Tensor], policy: ParameterPolicy) -> None:
    """Set the policy of parameters."""
    for parameter in parameters:
        _change(parameter, policy=policy, pending=pending_of(parameter) or Pending())


def pending_of(parameter: torch.Tensor) -> Pending | None:
    """The pending gradient of a parameter that has a policy."""
    return _record(parameter).pending


def is_planned(parameter: nn.Parameter) -> bool:
    """Whether a graph has decided where the parameter lives; later graphs obey."""
    return isinstance(parameter, DTensor) and _record(parameter).planned


def set_planned(parameter: nn.Parameter, planned: bool) -> None:
    """Record whether the stored state is a plan's decision, or provisional until then."""
    if isinstance(parameter, DTensor):
        _change(parameter, planned=planned)


def choice_of(parameter: torch.Tensor) -> str:
    """What was decided for a stored parameter on dp_shard; "": nothing."""
    return _record(parameter).choice


def set_choice(parameter: nn.Parameter, choice: str) -> None:
    """Record what was decided for a stored parameter on dp_shard."""
    if isinstance(parameter, DTensor):
        _change(parameter, choice=choice)


def copy_record(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give `target` what is known of `source`, with pending gradients of its own."""
    if _RECORD in source.__dict__:
        target.__dict__[_RECORD] = copy.deepcopy(source.__dict__[_RECORD])


_NOTHING = ParameterRecord()


def _record(parameter: Any) -> ParameterRecord:
    found: ParameterRecord = getattr(parameter, "__dict__", {}).get(_RECORD, _NOTHING)
    return found


def _change(parameter: torch.Tensor, **fields: Any) -> None:
    parameter.__dict__[_RECORD] = dataclasses.replace(_record(parameter), **fields)
