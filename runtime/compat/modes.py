"""Modes of torch, and what a captured graph has of them: fake, functional tensors, symbolic sizes;
operators of autoshard's own.

Autocast, grad mode, inference mode and dispatch modes are private switches of torch. It documents
the classes of those tensors and gives them no public module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


@contextlib.contextmanager
def explicit_modes(grad: bool) -> Iterator[None]:
    """Autocast off, and gradients on where `grad`: what a captured graph is compiled and run in.

    Its casts are operators of its own; autocast around it would add others, also in regions that
    the model excluded. The private guard turns off every device's autocast at once.
    """
    with torch._C._DisableAutocast(), torch.enable_grad() if grad else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def fake_kernels(mode: FakeTensorMode) -> Iterator[None]:
    """Operators computed on fakes as in a trace, whose dispatcher is private: without it a linear
    of symbolic sizes is torch 2.11's C++ one, which asks how many elements there are."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode, enable_python_dispatcher(), torch.no_grad():
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


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
]


def size_expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size; public functions only compare such sizes."""
    return size.node.expr


def size_symbols(size: Any) -> frozenset[Any]:
    """The symbols a symbolic size is made of."""
    return frozenset(size_expression(size).free_symbols)


def symbol_places(values: Iterable[Any]) -> dict[Any, int]:
    """The symbols that are among the values of a graph's placeholders, and the position of each:
    Dynamo hands a graph every symbol of its inputs' sizes as an input of its own."""
    return {
        size_expression(size): place
        for place, size in enumerate(values)
        if isinstance(size, torch.SymInt) and size_expression(size).is_Symbol
    }


def size_at(size: int | torch.SymInt, numbers: Mapping[Any, int]) -> int:
    """The number that a size is where its symbols are `numbers`."""
    return size if isinstance(size, int) else int(size_expression(size).xreplace(numbers))


def size_hint(size: torch.SymInt) -> int | None:
    """The value a symbolic size had while tracing, which no public function tells without a guard;
    what it is expected to be where `unknown_size` made it; else None: known at run time only."""
    found = size.node.hint
    if isinstance(found, int):
        return int(found)
    expected: dict[Any, int] = getattr(size.node.shape_env, _EXPECTED, {})
    if not expected or not size.node.expr.free_symbols <= expected.keys():
        return None
    return int(size.node.expr.xreplace(expected))


_library = torch.library.Library("autoshard", "FRAGMENT")


def define_operator(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Define the operator `autoshard::schema`, whose name says its version, if any.

    fake: of an operator that compilers see whole, its results for fake tensors.
    """
    full = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    if fake is None:
        _library.impl(full, kernel, "CompositeImplicitAutograd")
    else:
        _library.impl(full, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autoshard::{full}", fake, lib=_library)
    name, _, version = full.partition(".")
    return getattr(getattr(torch.ops.autoshard, name), version or "default")


_EXPECTED = "_autoshard_expected"


def unknown_size(fake: torch.Tensor, expected: int | torch.SymInt) -> torch.SymInt:
    """A size, at least 1, that an operator knows when it has run only, for its fake result.

    expected: what it is in the mean, for estimates. Dynamo switches off the public way to make
    one, lest graphs that a user did not ask for have such sizes.
    """
    assert isinstance(fake, FakeTensor)
    env = fake.fake_mode.shape_env
    assert env is not None
    size: torch.SymInt = env.create_unbacked_symint()
    torch._check(size >= 1)
    hint = expected if isinstance(expected, int) else size_hint(expected)
    if hint is not None:
        known = getattr(env, _EXPECTED, {})
        setattr(env, _EXPECTED, {**known, size_expression(size): hint})
        if hasattr(env, "var_to_hint_override"):
            env.var_to_hint_override[size_expression(size)] = hint
    return size


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a storage; those of fakes have no address to compare."""
    return bool(StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()))


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors of one storage share, those without elements too; while it lives."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def fake_in(fake: Any, other: torch.Tensor | None) -> FakeTensor:
    """A fake like one, in the memory of another or in its own. By the parts of a fake: an operator
    under a fake mode takes ten times as long."""
    storage: Any = (fake if other is None else other).untyped_storage()
    if other is None:
        storage = torch.UntypedStorage(storage.nbytes(), device="meta")
    meta = torch.empty(0, dtype=fake.dtype, device="meta")
    meta.set_(storage, fake.storage_offset(), fake.shape, fake.stride())
    return FakeTensor(fake.fake_mode, meta, fake.device)
