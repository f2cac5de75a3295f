"""Fake and functional tensors, symbolic sizes and storages, as a captured graph has them.

Torch documents these classes and gives them no public module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "is_traceable_wrapper_subclass",
    "same_storage",
    "size_expression",
    "size_hint",
    "size_symbols",
]


def size_expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size; public functions only compare such sizes."""
    return size.node.expr


def size_symbols(size: Any) -> frozenset[Any]:
    """The symbols a symbolic size is made of."""
    return frozenset(size_expression(size).free_symbols)


def size_hint(size: torch.SymInt) -> int | None:
    """The value a symbolic size had while tracing, which no public function tells without a guard;
    None where it is known at run time only."""
    found = size.node.hint
    return int(found) if isinstance(found, int) else None


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a storage; those of fakes have no address to compare."""
    return bool(StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()))


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors of one storage share, those without elements too; while it lives."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)
