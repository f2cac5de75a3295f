"""The model that a command plans, on the meta device, and a batch for it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.errors import ConfigError, message
from autoshard.names import callable_named, model_and_call
from autoshard.runtime import compat


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
        configuration class of transformers (`LlamaConfig`), or `module:factory`. A factory is
        called under torch.device("meta"), with `batch` and `sequence` where it takes arguments of
        these names; `names.model_and_call` says what it returns. A language model may come
        alone: it is called with input_ids and labels of [batch, sequence].
    settings: `key=value` entries of the Hugging Face configuration; values are read as JSON.

    Raises ConfigError for what cannot be found.
    """
    if ":" in name and not Path(name).exists():
        if settings:
            raise ConfigError(message(f"--set is for configurations, and {name} is a factory"))
        found = _from_factory(name, batch, sequence, dtype)
    else:
        found = _causal_lm(_configuration(name, settings), batch, sequence, dtype)
    compat.turn_off_cache(found.model)
    return found


def _from_factory(name: str, batch: int, sequence: int, dtype: torch.dtype) -> Source:
    factory = callable_named(name)
    known = inspect.signature(factory).parameters
    given = {k: v for k, v in (("batch", batch), ("sequence", sequence)) if k in known}
    with torch.device("meta"):
        model, args, kwargs = model_and_call(factory(**given), name)
    model = model.to("meta", dtype)
    if not args and not kwargs and "input_ids" in inspect.signature(model.forward).parameters:
        return _language_model(model, batch, sequence)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    return Source(model, args, kwargs)


def _language_model(model: nn.Module, batch: int, sequence: int) -> Source:
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return Source(model, (), {"input_ids": ids, "labels": ids.clone()}, ids.numel())


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
    compat.choose_causal_loss(model)
    return _language_model(model.to(dtype), batch, sequence)


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
