"""What Dynamo is asked to trace that it would break the graph at: private parts of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo.variables.builtin as _builtins

MARK = "autoshard_traces_leaves"
"""Attribute of a backend function for whose graphs `trace_leaves` holds."""


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


def _is_marked(backend: Any) -> bool:
    """Whether `backend`, or what Dynamo and torch.compile wrapped, is a marked function."""
    for _ in range(8):
        if backend is None or hasattr(backend, MARK):
            return backend is not None
        backend = getattr(backend, "__wrapped__", None) or getattr(backend, "compiler_fn", None)
    return False
