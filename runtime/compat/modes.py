"""Autocast, grad mode, inference mode and dispatch modes: private switches of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def explicit_modes(grad: bool) -> Iterator[None]:
    """Autocast off, and gradients on where `grad`: what a captured graph is compiled and run in.

    Its casts are operators of its own; autocast around it would add others, also in regions that
    the model excluded. The private guard turns off every device's autocast at once.
    """
    with torch._C._DisableAutocast(), torch.enable_grad() if grad else contextlib.nullcontext():
        yield


def autocast_is_on() -> bool:
    """Whether any device's autocast is enabled; Dynamo guards on it."""
    return bool(torch._C._is_any_autocast_enabled())


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Real, lasting tensors whatever the caller's modes: no fake or functional mode, no inference
    mode (its tensors can never be trained), no autograd.

    The backend is called in the middle of a trace, possibly from under inference_mode.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def meta_constants() -> Iterator[None]:
    """Fake modes made inside convert what `torch.tensor(..., device="meta")` gives under them, of
    which torch (2.13 and before) makes no fake: the empty tensor that a cache starts with.
    """
    made = FakeTensorMode.__init__

    def init(self: FakeTensorMode, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.allow_non_fake_inputs = True

    with mock.patch.object(FakeTensorMode, "__init__", init):
        yield


# Functions Dynamo leaves in its graph, which no public name reaches: what `x.data` is, and the
# switches of grad mode, autocast, inference mode and saved-tensor hooks.
GET_DATA = getattr(torch._C._autograd, "_get_data_attr", None)


SET_GRAD = torch._C._set_grad_enabled


ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast


EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode


EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode


SAVED_TENSOR_HOOKS = (
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
)


def autocast_knows(operator: str, device: str) -> bool:
    """Whether this torch gives an ATen operator an autocast rule on a device type."""
    key = f"Autocast{device.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)
