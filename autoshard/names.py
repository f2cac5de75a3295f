"""What a command line spells: a mesh, and a model by `module:factory`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autoshard.errors import ConfigError, message


def parse_mesh(text: str) -> dict[str, int]:
    """`dp_shard=2,tp=4` -> {"dp_shard": 2, "tp": 4}; ConfigError for anything else."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not name or not equals or not size.isdigit() or name in sizes:
            raise ConfigError(
                message(
                    f"{text!r} is no mesh: {part.strip()!r}",
                    remedy="Write each axis once, with its size: dp_shard=2,tp=4.",
                )
            )
        sizes[name] = int(size)
    return sizes


def callable_named(name: str) -> Callable[..., Any]:
    """The callable of `module:factory`; modules of the working directory are found too."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            message(f"{name!r} is no module:factory", remedy="Name a callable that makes a model.")
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(message(f"{name!r} cannot be found: {error}")) from error
    if not callable(found):
        raise ConfigError(message(f"{name!r} is a {type(found).__name__}, not a function"))
    return found  # type: ignore[no-any-return]


def model_and_call(made: Any, source: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What a factory returned, as (model, args, kwargs) of one call; ConfigError names `source`.

    A factory returns the model, or (model, args), (model, kwargs) or (model, args, kwargs); args
    may be one tensor. A model that torch.compile wrapped is unwrapped.
    """
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module) or len(rest) > 2:
        raise ConfigError(
            message(
                f"{source} returned a {type(model).__name__}, not a torch.nn.Module",
                remedy="Return the model, or (model, args), or (model, args, kwargs).",
            )
        )
    args: Any = rest[0] if rest else ()
    kwargs = rest[1] if len(rest) > 1 else {}
    if isinstance(args, Mapping) and not kwargs:  # (model, kwargs) has one reading only
        args, kwargs = (), args
    return model, tuple(args) if isinstance(args, (tuple, list)) else (args,), dict(kwargs)
