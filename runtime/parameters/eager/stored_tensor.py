"""`StoredTensor`: a stored parameter, its gradient and optimizer state, as eager code sees them.

A DTensor of the whole's shape around this rank's part. Optimizers work on the parts; beside plain
tensors it is its whole value (`stored_operators`); what is written to it lands in the parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.eager import stored_operators
from autoshard.runtime.parameters.eager.gathering import resolved, unsharded
from autoshard.runtime.parameters.eager.stored_operators import assign
from autoshard.runtime.parameters.layout import home_of, like, local_bounds, stored_states
from autoshard.runtime.parameters.record import copy_record

_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_NATIVE = DTensor.__torch_function__


class StoredTensor(DTensor):
    """A DTensor that eager code uses as the tensor it stands for.

    Reading its values is a collective: every rank of its mesh does it, or none. Its shape, dtype,
    device, requires_grad, `to_local()` and repr are free.
    """

    # None of these is a frame of its own to Dynamo, which looks into what a skipped frame calls

    @classmethod
    @compat.never_a_frame
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRADIENT and not torch.compiler.is_compiling():  # clip_grad_norm_: four times
            gradient = _NATIVE(func, types, args)
            if type(gradient) is DTensor:
                gradient.__class__ = cls
            return gradient
        if torch.compiler.is_dynamo_compiling():  # in a graph it is read as the whole by `access`
            with compat.plain_attributes():
                return func(*args, **(kwargs or {}))
        if compat.compiling():
            return stored_operators.apply_in_trace(cls, func, args, kwargs or {})
        if compat.transforming():
            return stored_operators.apply_in_transform(cls, func, args, kwargs or {})
        return stored_operators.apply(cls, func, args, kwargs or {})

    @staticmethod
    def __tensor_unflatten__(*args: Any, **kwargs: Any) -> StoredTensor:
        """As DTensor's own, by which compilers trace it and make their results, of this class."""
        return as_stored(DTensor.__tensor_unflatten__(*args, **kwargs))

    @compat.never_a_frame
    def __reduce_ex__(self, protocol: Any) -> Any:
        # a file of it is a file of the whole, which loads anywhere
        with torch.no_grad():
            whole = unsharded(self)
        if isinstance(self, nn.Parameter):
            whole = nn.Parameter(whole, requires_grad=self.requires_grad)
        return whole.__reduce_ex__(protocol)

    @compat.never_a_frame
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = like(self, compat.local_of(self).clone())
        if isinstance(self, nn.Parameter):
            copied = as_parameter(copied, self.requires_grad)  # type: ignore[assignment]
        copy_record(self, copied)
        memo[id(self)] = copied
        return copied

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's part; to PEFT, which makes adapters of its width, a meta tensor of the
        whole's shape, on which the module works."""
        if compat.called_from("_get_in_out_features", 1):
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole, as DTensor's own."""
        x = resolved(self)
        if home_of(x) is None:
            return DTensor.full_tensor(x, grad_placements=grad_placements)
        return unsharded(x)

    # What torch.distributed.checkpoint asks of a tensor: DTensor has no placement of one rank alone

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        if home_of(resolved(self)) is None:
            return super().__create_write_items__(fqn, object)  # type: ignore[no-any-return]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(compat.local_of(self)),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        if home_of(resolved(self)) is None:
            return super().__create_chunk_list__()  # type: ignore[no-any-return]
        bounds = local_bounds(self.shape, stored_states(self), axes_of(self.device_mesh))
        sizes = torch.Size([high - low for low, high in bounds])
        offsets = torch.Size([low for low, _ in bounds])
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)] if sizes.numel() else []

    def share_memory_(self) -> StoredTensor:
        """Have the part in memory that processes share."""
        compat.local_of(self).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the part is in memory that processes share."""
        return compat.local_of(self).is_shared()

    @compat.never_a_frame
    def __format__(self, spec: str) -> str:
        return format(unsharded(self), spec) if self.numel() == 1 else repr(self)

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
        return (
            f"{kind} {tuple(self.shape)} {self.dtype}, stored as {self.placements} on the mesh "
            f"{self.device_mesh.mesh_dim_names} {tuple(self.device_mesh.shape)}; "
            f"this rank's part:\n{compat.local_of(self)}"
        )

    @property
    @compat.never_a_frame
    def data(self) -> StoredTensor:  # type: ignore[override]
        """The same values without their history; what is written to it is written to this."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    @compat.never_a_frame
    def data(self, value: torch.Tensor) -> None:
        assign(self, value)


compat.clip_by_lists(StoredTensor)


def as_stored(x: DTensor) -> StoredTensor:
    """`x`, of which a StoredTensor is made in place."""
    x.__class__ = StoredTensor
    return x  # type: ignore[return-value]


def as_parameter(x: DTensor, requires_grad: bool) -> nn.Parameter:
    """A parameter that shares the memory of `x`.

    Of DTensor's own `detach`, whose part is no view: Dynamo looks for the base of a view. That is
    why it is not `nn.Parameter(x)`.
    """
    with compat.plain_attributes():
        made = as_stored(x.detach())  # type: ignore[arg-type]
        made.requires_grad_(requires_grad)
    compat.share_spec(made)
    return compat.marked_parameter(made)
