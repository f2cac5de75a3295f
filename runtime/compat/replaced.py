"""Functions of torch and of libraries that do something of ours where parameters are stored."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

_REPLACED = "_autoshard_replaced"


def replace(module: str, name: str, by: Callable[..., Any]) -> None:
    """Have callers of the function `name` of `module` call `by(original, *args, **kwargs)`.

    name: such as "Class.method". Does nothing where the module is not imported, or has no such
    function, as in other versions of a library; a function is replaced once. Of these libraries no
    hook exists that is called before they read the parameters.
    """
    owner: Any = sys.modules.get(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, last, None)
    if original is None or hasattr(original, _REPLACED):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(replaced, _REPLACED, True)
    setattr(owner, last, replaced)


def parametrized_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that torch.nn.utils.parametrize made for this module alone, with a property for
    each parametrised tensor; it is deleted from that class, which must be the module's own."""
    cls = type(module)
    if "parametrizations" not in module._modules or not cls.__name__.startswith("Parametrized"):
        return None
    return cls


def parametrized_subclass(cls: type[nn.Module], made: type[nn.Module]) -> type[nn.Module]:
    """The class that torch would have made, as it made `made`, of another class."""
    own = {k: v for k, v in vars(made).items() if k not in ("__dict__", "__weakref__")}
    metaclass: Any = type(made)
    return metaclass(made.__name__, (cls,), own)  # type: ignore[no-any-return]
