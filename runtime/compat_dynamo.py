"""What Dynamo is asked to trace and to guard otherwise than it would: private parts of torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._dynamo.variables.builtin as _builtins

MARK = "autoshard_traces_leaves"
"""Attribute of a backend function for whose graphs `trace_leaves` holds."""


def keep_variants(count: int) -> None:
    """Let Dynamo keep `count` variants of a function; torch.compile has no option for it."""
    torch._dynamo.config.recompile_limit = count


def trace_leaves() -> None:
    """Let Dynamo trace `x.requires_grad = True` on a value made in the graph, as nothing at all.

    Hugging Face's T5 and its kin write it on a tensor of zeros in every checkpointed layer, and the
    break would turn each layer into graphs of its own and its checkpoint into eager code. Nothing
    in a graph needs the gradient of such a value: only `x.grad` would hold it, which stays None.
    Does nothing in the graphs of other backends, or where this torch has no such function.
    """
    for owner, name in (
        (getattr(_builtins, "SetAttrBuiltinVariable", None), "_call_setattr"),  # since torch 2.13
        (_builtins.BuiltinVariable, "call_setattr"),
    ):
        found = getattr(owner, name, None)
        if found is not None and not hasattr(found, MARK):
            setattr(owner, name, _passing_over(found))


def _passing_over(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_attribute(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        if (
            name.is_python_constant()
            and name.as_python_constant() == "requires_grad"
            and obj.is_tensor()
            and obj.source is None
            and value.is_python_constant()
            and value.as_python_constant() is True
            and _is_marked(tx.output.compiler_fn)
        ):
            obj.requires_grad = True  # what the traced code reads from now on
            return value
        return original(self, tx, obj, name, value)

    setattr(set_attribute, MARK, True)
    return set_attribute


def lighten_guards() -> None:
    """Make the guards that Dynamo has for every DTensor of the graph being compiled cheap.

    It compares each spec, device mesh included, with a deep copy field by field: seven microseconds
    a parameter and call. A spec is never written to, so the object itself is equal at once; another
    one is compared as before. That a device mesh is one with another parameter's mesh, which it
    also asks, in Python, follows from the specs.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    found = context.guards_context.dynamo_guards.inner
    for guard in list(found):
        kind = guard.create_fn_name()
        if kind == "DTENSOR_SPEC_MATCH":
            found.discard(guard)
            new = _quick(guard.create_fn)
            found.add(dataclasses.replace(guard, create_fn=new, _hash=None))
        elif kind == "DUPLICATE_INPUT" and guard.name.endswith(".device_mesh"):
            found.discard(guard)


def _quick(create: Callable[..., Any]) -> Callable[..., Any]:
    """What creates the guard that `create` does, but lets the object of now pass at once."""

    @functools.wraps(create)
    def created(builder: Any, guard: Any) -> None:
        now, manager = builder.get(guard), builder.get_guard_manager(guard)

        class Manager:
            @staticmethod
            def add_lambda_guard(check: Callable[[Any], bool], *said: Any) -> None:
                manager.add_lambda_guard(lambda spec: spec is now or check(spec), *said)

        with mock.patch.object(builder, "get_guard_manager", lambda _: Manager):
            create(builder, guard)

    return created


def _is_marked(backend: Any) -> bool:
    """Whether `backend`, or what Dynamo and torch.compile wrapped, is a marked function."""
    for _ in range(8):
        if backend is None or hasattr(backend, MARK):
            return backend is not None
        backend = getattr(backend, "__wrapped__", None) or getattr(backend, "compiler_fn", None)
    return False
