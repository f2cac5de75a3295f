"""Attribute access of stored parameters: `module.weight` is the whole weight, made on demand.

A module that owns stored parameters gets a subclass of its own class with one property a
parameter. `_parameters`, `state_dict` keys, `named_parameters`, `isinstance` and the class's name
do not change; `type(module) is nn.Linear` does. In Dynamo's graph each access is one
`materialize` node; in eager code it is a collective on every rank of the mesh.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.materialize import materialize
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.storage import local_part, owned, stored_states, wrap_local

_reading_storage = False


@contextlib.contextmanager
def stored() -> Iterator[None]:
    """Inside, `module.weight` is the stored DTensor itself, not the whole weight.

    For code that writes to parameters through attributes, such as `reset_parameters()`: writes
    to the whole weight would be lost. For the whole process, not only this thread.
    """
    global _reading_storage
    before, _reading_storage = _reading_storage, True
    try:
        yield
    finally:
        _reading_storage = before


def install(module: nn.Module, names: Sequence[str]) -> None:
    """Make the parameters `names` of `module` readable as whole tensors."""
    cls = type(module)
    if issubclass(cls, Stored):
        names = sorted({*cls._autoshard_names, *names})
        cls = cls._autoshard_class
    module.__class__ = stored_class(cls, tuple(sorted(names)))  # type: ignore[arg-type]
    if isinstance(module, nn.RNNBase):
        # The list holds whole tensors; StoredRNN makes it from the parameters instead.
        module.__dict__.pop("_flat_weights", None)
        module.__dict__["_flat_weight_refs"] = []


class Stored:
    """What every such subclass has besides its properties.

    Without `__slots__`: with them, Python refuses to assign the subclass to an instance.
    """

    _autoshard_class: type[nn.Module]
    _autoshard_names: tuple[str, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with stored():
            reduced = super().__reduce_ex__(protocol)
        if (
            isinstance(reduced, tuple)
            and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]
            and reduced[1][0] is type(self)
        ):
            # The subclass cannot be found by its name; it is made again where it is loaded.
            names = (self._autoshard_class, self._autoshard_names)
            return (_new, (*names, *reduced[1][1:]), *reduced[2:])
        return reduced

    def __setstate__(self, state: Any) -> None:
        with stored():
            super().__setstate__(state)  # type: ignore[misc]

    def __repr__(self) -> str:
        # extra_repr reads `self.bias`; printing on one rank must not wait for the others
        with stored():
            return super().__repr__()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accepts whole tensors as well as DTensors."""
        for name in self._autoshard_names:
            parameter = self._parameters.get(name)  # type: ignore[attr-defined]
            value = state_dict.get(prefix + name)
            if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
                continue
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = part_like(value, parameter)
        with stored():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


class StoredRNN(Stored):
    """The RNN family keeps its weights in a second list, and in weak references to them."""

    @property
    def _flat_weights(self) -> list[Any]:
        names: list[str] = self._flat_weights_names  # type: ignore[attr-defined]
        return [getattr(self, name, None) for name in names]

    @_flat_weights.setter
    def _flat_weights(self, value: list[Any]) -> None:
        pass

    def _init_flat_weights(self) -> None:
        self.__dict__["_flat_weight_refs"] = []

    def _update_flat_weights(self) -> None:
        pass

    def flatten_parameters(self) -> None:
        """Nothing to flatten: the whole weights live for one call only."""

    def __setattr__(self, name: str, value: Any) -> None:
        with stored():
            super().__setattr__(name, value)


@functools.cache
def stored_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `cls` whose attributes `names` are whole tensors; one per (cls, names)."""
    mixin = StoredRNN if issubclass(cls, nn.RNNBase) else Stored
    namespace: dict[str, Any] = {name: _whole(name) for name in names}
    namespace.update(
        __module__=cls.__module__,
        __qualname__=cls.__qualname__,
        __doc__=cls.__doc__,
        _autoshard_class=cls,
        _autoshard_names=names,
    )
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (mixin, cls), namespace)  # type: ignore[no-any-return]


def part_like(whole: torch.Tensor, parameter: DTensor) -> DTensor:
    """A whole tensor cut and placed like a stored parameter; every rank gives the same tensor."""
    states, mesh = stored_states(parameter), parameter.device_mesh
    part = local_part(whole.detach(), states, axes_of(mesh)).to(mesh.device_type)
    return wrap_local(owned(part), parameter.shape, states, mesh)


def _whole(name: str) -> property:
    @compat.never_a_frame
    def get(self: nn.Module) -> Any:
        if name not in self._parameters:  # deleted, perhaps replaced by a plain attribute
            if name not in self.__dict__:
                raise AttributeError(name)
            return self.__dict__[name]
        parameter = self._parameters[name]
        if _reading_storage or not isinstance(parameter, DTensor):
            return parameter
        return materialize(parameter)

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(get, put, delete)


def _new(cls: type[nn.Module], names: tuple[str, ...], *args: Any) -> Any:
    made = stored_class(cls, names)  # type: ignore[arg-type]
    return made.__new__(made, *args)
