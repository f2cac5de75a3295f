"""An optimizer of which this package replaces the step: the same object, of a class of its name."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from autoshard.runtime.errors import AutoshardError

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Derived(Optimizer):
    """What replaces methods of an optimizer of the class `base`."""

    base: type[Optimizer]
    mixin: type[Derived]

    def take_step(self, closure: Any = None) -> Any:
        """What `step` runs between its hooks."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.mixin, self.base), self.__getstate__()


def become(optimizer: Optimizer, mixin: type[Derived], function: str) -> None:
    """Have an optimizer take the steps of `mixin`. function: the public one that says so.

    Raises AutoshardError where somebody holds its step already.
    """
    cls: Any = optimizer.base if isinstance(optimizer, Derived) else type(optimizer)
    kind: Any = mixin
    if "step" in optimizer.__dict__:
        raise AutoshardError(
            f"{function}: something has wrapped step() of this {cls.__name__} already, as "
            "learning-rate schedulers do",
            remedy=f"Call autoshard.{function} before the optimizer is given to others.",
        )
    optimizer.__class__ = _class(kind, cls)


def unhooked_step(cls: type[Optimizer]) -> Any:
    """The step of a class without the hooks, which ran for the whole optimizer."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def proxy_of(optimizer: Any, groups: Sequence[Sequence[torch.Tensor]], state: Any) -> Any:
    """An optimizer of the class and settings of another, and of other parameters."""
    proxy = optimizer.base.__new__(optimizer.base)
    proxy.__dict__.update(optimizer.__dict__)
    proxy.__dict__.pop("step", None)
    proxy.param_groups = [
        {**group, "params": list(own)} for group, own in zip(optimizer.param_groups, groups)
    ]
    proxy.state = state
    return proxy


@functools.cache
def _class(mixin: Any, cls: Any) -> type[Any]:
    step: Any = Optimizer.profile_hook_step(mixin.take_step)
    step.hooked = True
    space = {"step": step, "base": cls, "mixin": mixin, "__doc__": cls.__doc__}
    if any(Optimizer in (base, base.__base__) for base in _first_bases(cls)):
        return type(cls.__name__, (mixin, cls), space)
    # of a class with another first base (ABC) Python takes an object of a derived one if that
    # begins with it
    own = {name: value for name, value in vars(mixin).items() if not name.startswith("__")}
    return type(cls.__name__, (cls, mixin), {**own, **space})


def _first_bases(cls: Any) -> Iterator[Any]:
    while cls is not object:
        yield cls
        cls = cls.__base__


def _empty(mixin: Any, cls: Any) -> Any:
    made: Any = _class(mixin, cls)
    return made.__new__(made)
