"""The model that `autoshard plan` is asked about, on the meta device, and a batch for it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.errors import ConfigError, message


@dataclass
class Source:
    """A model without memory, the arguments of one call of it, and the tokens in them, if known."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None


def load_source(
    name: str, batch: int, sequence: int, dtype: torch.dtype, settings: Sequence[str] = ()
) -> Source:
    """The model `name` means, its floating-point parameters in `dtype`.

    name: a directory with a Hugging Face `config.json` (weights are not read), the name of a
        configuration class of transformers (`LlamaConfig`), or `module:factory`. A factory returns
        a module, or (module, args), or (module, args, kwargs); it is called under
        torch.device("meta"), with `batch` and `sequence` where it takes arguments of these names.
    settings: `key=value` entries of the Hugging Face configuration; values are read as JSON.

    Raises ConfigError for what cannot be found.
    """
    if ":" in name and not Path(name).exists():
        if settings:
            raise ConfigError(message(f"--set is for configurations, and {name} is a factory"))
        return _from_factory(name, batch, sequence, dtype)
    return _causal_lm(_configuration(name, settings), batch, sequence, dtype)


def _from_factory(name: str, batch: int, sequence: int, dtype: torch.dtype) -> Source:
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(message(f"{name} cannot be found: {error}")) from error
    known = inspect.signature(factory).parameters
    given = {k: v for k, v in (("batch", batch), ("sequence", sequence)) if k in known}
    with torch.device("meta"):
        made = factory(**given)
    parts = made if isinstance(made, tuple) else (made,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 3:
        raise ConfigError(
            message(
                f"{name} returned {type(parts[0] if parts else made).__name__}",
                remedy="A factory returns a module, or (module, args), or (module, args, kwargs).",
            )
        )
    example: tuple[Any, Any] = (
        parts[1] if len(parts) > 1 else (),
        parts[2] if len(parts) > 2 else {},
    )
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), example)
    return Source(parts[0].to("meta", dtype), tuple(args), dict(kwargs))


def _configuration(name: str, settings: Sequence[str]) -> Any:
    transformers = _transformers(name)
    given = dict(map(_setting, settings))
    if (Path(name) / "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(name, **given)
    else:
        made = getattr(transformers, name, None)
        base = transformers.PretrainedConfig
        if not (isinstance(made, type) and issubclass(made, base)):
            raise ConfigError(
                message(
                    f"{name} is no directory with a config.json, no module:factory and no "
                    "configuration class of transformers",
                    remedy="Such a class is LlamaConfig.",
                )
            )
        config = made(**given)
    default = type(config)()  # a configuration keeps whatever it is given
    unknown = [key for key in given if not hasattr(default, key)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], default.to_dict(), n=1)
        raise ConfigError(
            message(
                f"{type(config).__name__} has no entry {unknown[0]!r}",
                remedy=f"Did you mean {near[0]!r}?" if near else None,
            )
        )
    return config


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(message(f"--set {text!r} is not key=value"))
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _causal_lm(config: Any, batch: int, sequence: int, dtype: torch.dtype) -> Source:
    transformers = _transformers(type(config).__name__)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < sequence:
        raise ConfigError(
            message(
                f"a sequence of {sequence} is longer than max_position_embeddings={longest}",
                remedy=f"Give --sequence {longest}, or --set max_position_embeddings={sequence}.",
            )
        )
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(
            message(
                f"{type(config).__name__} makes no causal language model",
                remedy="Write a module:factory that returns (model, args) for it.",
            )
        ) from error
    if getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"  # else its guess is logged, which Dynamo cannot trace
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    batch_of = {"input_ids": ids, "labels": ids.clone()}
    return Source(model.to(dtype), (), batch_of, ids.numel())


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            message(
                f"{name} is a Hugging Face configuration, and transformers is not installed",
                remedy="pip install 'autoshard[export]', or name a module:factory.",
            )
        ) from error
