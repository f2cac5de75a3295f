"""DTensors, wrapper tensors and functional tensors: private parts of torch's tensors."""

from __future__ import annotations

import atexit
import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _foreach_supported_types

from autoshard.runtime.compat.version import TRANSFERS, probe
from autoshard.runtime.errors import AutoshardError


def nccl_communicator(group: Any) -> int:
    """The address of a process group's ncclComm_t, which no public function tells."""
    return int(group._get_backend(torch.device("cuda"))._comm_ptr())


def wrapper_tensor(
    cls: type,
    shape: tuple[Any, ...],
    like: torch.Tensor,
    grad: bool,
    strides: Sequence[Any] | None = None,
) -> Any:
    """A tensor of subclass `cls` with a shape and no memory; dtype and device are those of `like`.

    strides: of a contiguous tensor, if not given.

    What every wrapper subclass in torch is made by, and has no public name.
    """
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, shape, strides=strides, dtype=like.dtype, device=like.device, requires_grad=grad
    )


def has_data_mutation(functional: Any) -> bool:
    """Whether a FunctionalTensor was written to: functionalisation has no public reader."""
    return bool(torch._functionalize_has_data_mutation(functional.elem))  # type: ignore[attr-defined]


def shard_placement(dim: int, inner: int) -> Placement:
    """Shard `dim`, which inner mesh axes have already split into `inner` parts before this one.

    The class torch's FSDP uses for "tp first, then dp" on one dim is private.
    """
    return Shard(dim) if inner == 1 else _StridedShard(dim, split_factor=inner)


def placement_dim(placement: Placement) -> int | None:
    """The sharded dim of a stored placement, or None for Replicate.

    `is_shard()` and isinstance(_, Shard) are both False for the strided kind.
    """
    if isinstance(placement, (Shard, _StridedShard)):
        return placement.dim
    if isinstance(placement, Replicate):
        return None
    raise AutoshardError(
        f"a parameter is stored as {placement}",
        remedy="Parameters may be stored as Shard or Replicate.",
    )


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself: `to_local()` costs an autograd function a call."""
    return tensor._local_tensor


def is_static_address(tensor: torch.Tensor) -> bool:
    """Whether somebody has said, by `torch._dynamo.mark_static_address`, that its memory stays."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def version_of(tensor: DTensor) -> tuple[int, int, int]:
    """What differs between two times where the part has been written to, or has new storage. A
    compiled write may count for the part or for the whole."""
    local = tensor._local_tensor
    return id(local), local._version, tensor._version


def writes_to(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor, or to what shares its memory."""
    return tensor._version


def marked_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """`tensor`, made an nn.Parameter in place, as nn.Parameter marks tensors of other classes."""
    tensor.__dict__["_is_param"] = True  # what isinstance(tensor, nn.Parameter) asks
    return tensor  # type: ignore[return-value]


def spec_of(tensor: DTensor) -> Any:
    """The mesh, placements and global shape of a DTensor in one object, without autograd."""
    return tensor._spec


def detached_locals(parameters: Sequence[DTensor]) -> list[torch.Tensor]:
    """The local tensors, a fresh object each, without autograd."""
    return [parameter._local_tensor.detach() for parameter in parameters]


def dtensor_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """`local` in a DTensor with the class, mesh, placements and shape of `parameter`, without
    autograd.

    Without `__init__` too, which does nothing and asks Dynamo's leave for it: 5 of 7 microseconds.
    """
    spec = parameter._spec
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, meta._replace(dtype=local.dtype))
    cls = type(parameter)
    return cls.__new__(cls, local, spec, requires_grad=False)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands that a call of an operator writes to, by its schema; of a function without one,
    none."""
    if hasattr(func, "overloads"):
        func = getattr(func, func.overloads()[0])
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
    return pytree.tree_leaves([given.get(a.name) for a in schema.arguments if a.is_write])


def clip_by_lists(cls: type[torch.Tensor]) -> None:
    """Have `clip_grad_norm_` and `clip_grad_value_` take gradients of a class as lists."""
    if cls not in _foreach_supported_types:
        _foreach_supported_types.append(cls)


def norm_placement(order: float) -> Placement:
    """Of the norms of the ranks' parts, whose norm is the whole's."""
    return Partial("max") if math.isinf(order) else _NormPartial(order)


def reduction_of(placement: Any) -> tuple[str, float]:
    """The operator that reduces Partial values, and of which power of them."""
    return placement.reduce_op, float(getattr(placement, "norm_type", 1.0))


def set_stored(parameter: DTensor, new: DTensor) -> None:
    """Give a parameter the storage, dtype and device of another DTensor; it stays the same object.

    `torch.utils.swap_tensors`, which modules use, refuses what Dynamo holds weak references to.
    """
    torch.Tensor.data.__set__(parameter, new)  # type: ignore[attr-defined]
    parameter._local_tensor, parameter._spec = new._local_tensor, new._spec
    share_spec(parameter)


def share_spec(parameter: DTensor) -> None:
    """Make equal specs one object, so that a guard sees by identity that they are equal."""
    spec = parameter._spec
    key = (id(spec.mesh), spec.placements, spec.tensor_meta)
    parameter._spec = _specs.setdefault(key, spec)


# Weakly: a mesh, by whose identity they are found, is alive as long as a spec holds it.
_specs: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
# A spec that dies with the interpreter would have its placements hashed by a module that is empty.
atexit.register(_specs.clear)


plain_attributes = torch._C.DisableTorchFunctionSubclass
"""Inside, reading `grad`, `requires_grad` or hooks of a DTensor does not first ask its class."""


@functools.cache
def transfers() -> Any:
    """torch's `offload`, `reload` and `wait_tensor`, which copy between a GPU and the host on a
    stream of their own. AutoshardError where this torch has none."""
    probe(TRANSFERS)
    from torch._functorch._activation_offloading import offload_ops

    return offload_ops
