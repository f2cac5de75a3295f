"""A model and a batch by name, without weights: for commands that plan and run nothing."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.errors import ConfigError, message


def load_example(
    source: str, batch: int, sequence: int, dtype: str | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model that `source` names, on the meta device, and keyword arguments for one call.

    source: a Hugging Face directory (its config.json is read, no weights), or `module:factory`.
    A factory takes no arguments and returns the module, or the module and the call's arguments, a
    dict by name or a tuple by position; a module alone is called as a language model, with
    input_ids and labels of [batch, sequence]. dtype: of the parameters; None: as they are made.
    Raises ConfigError.
    """
    with torch.device("meta"):
        made = _pretrained(source) if _is_directory(source) else _made(source)
        model, call = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                message(
                    f"{source} returned a {type(model).__name__}",
                    remedy="Return a torch.nn.Module, or one and a dict of keyword arguments.",
                )
            )
        if dtype is not None:
            model = model.to(getattr(torch, dtype))
        if call is None:
            ids = torch.zeros(batch, sequence, dtype=torch.long)
            call = {"input_ids": ids, "labels": ids}
    # a cache of keys and values has no use in training
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if isinstance(call, tuple):
        call = inspect.signature(model.forward).bind(*call).arguments
    return model, dict(call)


def parse_mesh(text: str) -> dict[str, int]:
    """`dp_shard=2,tp=4` -> {"dp_shard": 2, "tp": 4}; ConfigError for anything else."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not size.strip().isdigit():
            raise ConfigError(
                message(f"{text!r} is no mesh", remedy="Write axes and sizes: dp_shard=2,tp=4.")
            )
        sizes[name.strip()] = int(size)
    return sizes


def _is_directory(source: str) -> bool:
    return (Path(source) / "config.json").is_file()


def _pretrained(source: str) -> nn.Module:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            message(
                f"{source} is a Hugging Face directory, and transformers is not installed",
                remedy="pip install 'autoshard[export]'",
            )
        ) from error
    config = transformers.AutoConfig.from_pretrained(source)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _made(source: str) -> nn.Module | tuple[nn.Module, Mapping[str, Any]]:
    name, colon, attribute = source.partition(":")
    if not colon:
        raise ConfigError(
            f"{source} is neither a directory with a config.json nor module:factory"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{source} cannot be found: {error}") from error
    made: nn.Module | tuple[nn.Module, Mapping[str, Any]] = factory()
    return made
