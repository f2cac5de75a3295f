"""Attribute access of stored parameters: `module.weight` is the parameter, and whole in a graph.

A module that owns stored parameters gets a subclass of its own class with one property a
parameter. `_parameters`, `state_dict` keys, `named_parameters`, `isinstance` and the class's name
do not change; `type(module) is nn.Linear` does. What Dynamo traces for our backend reads the whole
weight, one `unshard_parameter` node each access; eager code, and what other backends compile, reads
the stored parameter itself (`StoredTensor`).
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrize

from autoshard.runtime import compat
from autoshard.runtime.parameters.data_unsharding import SINGLE, ParameterPolicy
from autoshard.runtime.parameters.eager import StoredTensor, WholeView, unsharded
from autoshard.runtime.parameters.gradients import begin
from autoshard.runtime.parameters.layout import part_like
from autoshard.runtime.parameters.owners import Owners, find_owners
from autoshard.runtime.parameters.record import policy_of, set_policy
from autoshard.runtime.parameters.unsharding import unshard_parameter


def install(parameters: Iterable[nn.Parameter], owners: Owners) -> list[nn.Module]:
    """Make parameters readable as whole tensors, by the modules that own them; returns those."""
    names: dict[nn.Module, list[str]] = {}
    for parameter in parameters:
        for module, name in owners.modules[parameter]:
            names.setdefault(module, []).append(name)
    for module, own in names.items():
        _install(module, own)
    return list(names)


def _install(module: nn.Module, names: Sequence[str]) -> None:
    cls = type(module)
    parametrized = compat.parametrized_class(module)
    if parametrized is not None:  # torch, when it removes it, takes for granted that it comes first
        cls = parametrized.__bases__[0]
    if issubclass(cls, Stored):
        names = sorted({*cls._autoshard.names, *names})
        cls = cls._autoshard.cls
    policies = [policy_of(p) for p in module._parameters.values() if p is not None]
    dtype = next((policy.param for policy in policies if policy.param is not None), None)
    made = stored_class(cls, tuple(sorted(names)), dtype)  # type: ignore[arg-type]
    if parametrized is not None:
        made = compat.parametrized_subclass(made, parametrized)
    module.__class__ = made  # type: ignore[assignment]
    begin(module)
    if isinstance(module, nn.RNNBase):
        # The list holds whole tensors; StoredRNN makes it from the parameters instead.
        module.__dict__.pop("_flat_weights", None)
        module.__dict__["_flat_weight_refs"] = []


@compat.never_a_frame
def _registered(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    """Make a stored parameter readable in graphs by a module that gets it later: under another
    name (`weight_orig` of pruning), or in another model. A graph that Dynamo makes has it as is."""
    if isinstance(parameter, StoredTensor) and not (
        compat.compiling() or (isinstance(module, Stored) and name in module._autoshard.names)
    ):
        _install(module, [name])


register_module_parameter_registration_hook(_registered)
compat.READ_WHOLE[StoredTensor] = unshard_parameter
# in a forward, Dynamo would make graphs of them, in which the original is no parameter
compat.never_a_frame(parametrize.register_parametrization)
compat.never_a_frame(parametrize.remove_parametrizations)
parametrize.ParametrizationList.__init__ = compat.not_traced(  # type: ignore[method-assign]
    parametrize.ParametrizationList.__init__
)
compat.ONLY_IN_OURS.add(WholeView)


def cast_parameters(parameters: Sequence[nn.Parameter], policy: ParameterPolicy) -> list[nn.Module]:
    """Make whole parameters readable in the dtype `policy.param`; returns the owning modules.

    Dynamo then traces the model in that dtype. Their own values and gradients keep theirs.
    """
    owners = find_owners(tuple(parameters))
    set_policy(parameters, policy)
    return install(parameters, owners)


@contextlib.contextmanager
def casting(model: nn.Module, policy: ParameterPolicy) -> Iterator[None]:
    """Inside, the parameters of an unsharded model are read in the dtype `policy.param`."""
    modules = list(model.modules())
    before = [(module.__class__, dict(module.__dict__)) for module in modules]
    attributes = [(p, dict(p.__dict__)) for p in model.parameters()]
    try:
        cast_parameters([p for p, _ in attributes], policy)
        yield
    finally:
        for module, (cls, values) in zip(modules, before):
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(values)
        for parameter, values in attributes:
            parameter.__dict__.clear()
            parameter.__dict__.update(values)


class StoredClass(NamedTuple):
    """The parts of a subclass: the module's own class, the names of its stored parameters, and
    the dtype in which they are read (None: as they are stored)."""

    cls: type[nn.Module]
    names: tuple[str, ...]
    dtype: torch.dtype | None


class Stored:
    """The common base of these subclasses; each adds its properties.

    Without `__slots__`: with them, Python refuses to assign the subclass to an instance.
    """

    _autoshard: StoredClass
    _autoshard_sync: str = SINGLE

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the parameters are saved whole: the module that loads them is one of the user's own class
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[1:2] and reduced[1][:1] == (type(self),):
            cls = self._autoshard.cls
            return (cls.__new__, (cls, *reduced[1][1:]), *reduced[2:])
        return reduced

    def __copy__(self) -> Any:
        made: Any = type(self).__new__(type(self))
        made.__setstate__(self.__getstate__())  # not the call `compile()` bound
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)
        if own is not None:
            return own(memo)
        reduced = super().__reduce_ex__(4)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            raise copy.Error(f"{type(self).__name__} has a __reduce__ and no __deepcopy__")
        made = memo[id(self)] = reduced[0](*reduced[1])
        state = copy.deepcopy(reduced[2], memo)
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            made.__dict__.update(state)
        return made

    # Models convert a module, or set one, between two graphs of their forward

    @compat.never_a_frame
    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """As nn.Module's; of a stored tensor (the mask of a pruned weight) it keeps the whole."""
        whole = tensor
        if isinstance(tensor, StoredTensor):
            whole = unsharded(tensor).detach()
        super().register_buffer(name, whole, persistent)  # type: ignore[misc]

    @compat.never_a_frame
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `half`, `double`, ...: of stored parameters the shards are converted."""
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        kept = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
        parameters.update(dict.fromkeys(kept))
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            parameters.update(kept)
        with torch.no_grad():
            for parameter in kept.values():
                _convert(parameter, fn)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accepts whole tensors as well as DTensors."""
        for name in self._autoshard.names:
            parameter = self._parameters.get(name)  # type: ignore[attr-defined]
            value = state_dict.get(prefix + name)
            if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
                continue
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = part_like(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


class StoredRNN(Stored):
    """The RNN family keeps its weights in a second list, and in weak references to them."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        reduced[2]["_flat_weights"] = self._flat_weights  # where it loads there is no property
        return reduced

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


@functools.cache
def stored_class(
    cls: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype | None = None
) -> type[nn.Module]:
    """The subclass of `cls` whose attributes `names` are whole tensors, in `dtype` where it is
    given; one for the same arguments."""
    mixin = StoredRNN if issubclass(cls, nn.RNNBase) else Stored
    namespace: dict[str, Any] = {name: _whole(name, dtype) for name in names}
    namespace.update(
        __module__=cls.__module__,
        __qualname__=cls.__qualname__,
        __doc__=cls.__doc__,
        _autoshard=StoredClass(cls, names, dtype),
    )
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (mixin, cls), namespace)  # type: ignore[no-any-return]


def _convert(parameter: DTensor, fn: Any) -> None:
    with compat.plain_attributes():
        new, grad = fn(parameter), parameter.grad
        if new is not parameter:
            parameter.grad = None  # else it would have to be of the new dtype at once
            compat.set_stored(parameter, new)
            parameter.grad = None if grad is None else fn(grad)


def _whole(name: str, dtype: torch.dtype | None) -> property:
    @compat.never_a_frame
    def get(self: nn.Module) -> Any:
        if name not in self._parameters:  # deleted, perhaps replaced by a plain attribute
            if name not in self.__dict__:
                raise AttributeError(name)
            return self.__dict__[name]
        parameter = self._parameters[name]
        if parameter is None or (dtype is None and not isinstance(parameter, DTensor)):
            return parameter
        tracing = torch.compiler.is_dynamo_compiling()
        if isinstance(parameter, DTensor) and not (tracing and compat.traced_as_ours()):
            return parameter
        # a plain parameter does not know its dtype of compute, as a StoredTensor does: a
        # forward that Dynamo left to eager code would multiply tensors of two dtypes
        if not tracing and not compat.called_from("forward", 1):
            return parameter
        # without gradients there is nothing to accumulate, and no variant to compile
        sync = self._autoshard_sync if torch.is_grad_enabled() else SINGLE
        return unshard_parameter(parameter, sync, dtype)

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(get, put, delete)
