"""A model by name: `module:factory`, a Hugging Face directory, or a configuration class."""

import contextlib
import copy
import functools
import importlib
import inspect
import operator
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoshard.errors import AutoshardError, ConfigError, message
from autoshard.hf_configuration import (
    bounded_modules,
    check_configuration,
    check_entries,
    check_known,
    load_pretrained,
    transformers_errors,
)
from autoshard.runtime import compat

MOST_TOKENS = 2**32
"""Tokens of a batch whose sizes are still numbers that torch can multiply."""


@dataclass
class ModelCall:
    """A model, the arguments of one call of it, and the tokens in them where that is known."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None


def load_model(name: str, entries: Mapping[str, Any] | None = None) -> nn.Module:
    """The model `name` means, on the CPU, in the dtype it is stored in.

    name: a directory with a Hugging Face `config.json`, weights, and the class in its
        `architectures`; the name of a configuration class of transformers (`LlamaConfig`), whose
        weights are then random; or `module:factory`, called without arguments (`model_and_call`
        says what it returns).
    entries: of the Hugging Face configuration, in place of its own.

    Raises ConfigError for what cannot be found, and for weights that are not the model's.
    """
    if is_factory(name):
        return model_and_call(_call(callable_named(name), name), name)[0]
    config = _configuration(name, entries or {})
    transformers = _transformers(name)
    if os.path.isfile(Path(name) / "config.json"):
        with bounded_modules(name), transformers_errors(f"{name} cannot be loaded"):
            return load_pretrained(transformers, name, config, **_DATA_ONLY)
    return _causal_lm(config, "cpu")


def check_named(name: str, entries: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for a name, a configuration or entries that `load_model` refuses."""
    _configuration(name, entries or {})


def load_on_meta(
    name: str,
    batch: int,
    sequence: int,
    dtype: torch.dtype,
    entries: Mapping[str, Any] | None = None,
) -> ModelCall:
    """The model `name` means, without weights, its floating-point parameters in `dtype`.

    name, entries: as for `load_model`; of a directory only the `config.json` is read. A factory is
        called under torch.device("meta"), with `batch` and `sequence` where it takes arguments of
        these names. A language model may come alone: it is called with input_ids and labels of
        [batch, sequence].

    Raises ConfigError for what cannot be found, and for more than MOST_TOKENS.
    """
    if batch * sequence > MOST_TOKENS:
        raise ConfigError(
            f"a batch of {batch:,} x {sequence:,} tokens is more than {MOST_TOKENS:,}",
            remedy="Give the batch of one data-parallel rank.",
        )
    if is_factory(name):
        found = _from_factory(name, batch, sequence, dtype)
    else:
        config = _configuration(name, entries or {})
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and 0 < longest < sequence:
            remedy = f"Give --sequence {longest}, or --option max_position_embeddings={sequence}."
            what = f"a sequence of {sequence} is longer than max_position_embeddings={longest}"
            raise ConfigError(what, remedy=remedy)
        found = _language_model(_causal_lm(config, "meta").to(dtype), batch, sequence)
    compat.turn_off_cache(found.model)  # it has no use in training
    return found


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a Hugging Face directory, or None where there is none."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any(os.path.isfile(Path(name) / file) for file in files):
        return None
    auto = _transformers(name).AutoTokenizer
    with transformers_errors(f"the tokenizer of {name} cannot be read"):
        return auto.from_pretrained(name, **_DATA_ONLY)


def is_factory(name: str) -> bool:
    """Whether `name` is of the form `module:factory`."""
    return ":" in name and not os.path.isfile(name) and not os.path.isdir(name)


def callable_named(name: str) -> Callable[..., Any]:
    """The callable of `module:factory`; modules of the working directory are found too."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"{name!r} is no module:factory", remedy="Name a callable that makes a model."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(message(f"{name!r} cannot be found: {error}")) from error
    except Exception as error:  # of the module itself
        raise _failed(f"{name!r} cannot be imported", error) from error
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
            f"{source} returned a {type(model).__name__}, not a torch.nn.Module",
            remedy="Return the model, or (model, args), or (model, args, kwargs).",
        )
    args: Any = rest[0] if rest else ()
    kwargs = rest[1] if len(rest) > 1 else {}
    if isinstance(args, Mapping) and not kwargs:  # (model, kwargs) has one reading only
        args, kwargs = (), args
    return model, tuple(args) if isinstance(args, (tuple, list)) else (args,), dict(kwargs)


def copied(model: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy of a model; of the tensors whose id is `known`, what stands there.

    What a module holds of a step (the weight that torch.nn.utils.weight_norm computed, a result
    that was kept to be looked at) is copied without its history: deepcopy refuses such tensors.
    """
    memo = dict(known or {})
    for module in model.modules():
        for held in pytree.tree_leaves(vars(module)):
            if isinstance(held, torch.Tensor) and not held.is_leaf and id(held) not in memo:
                memo[id(held)] = held.detach().clone()
    return copy.deepcopy(model, memo)


def _call(factory: Callable[..., Any], name: str, **given: Any) -> Any:
    try:
        return factory(**given)
    except AutoshardError:
        raise
    except Exception as error:
        raise _failed(f"{name} cannot make a model", error) from error


def _failed(what: str, error: Exception) -> ConfigError:
    """The error of a user's module, with the line that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<")
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return ConfigError(f"{what}: {type(error).__name__}: {error}", where=where)


def _from_factory(name: str, batch: int, sequence: int, dtype: torch.dtype) -> ModelCall:
    factory = callable_named(name)
    try:
        known: Mapping[str, Any] = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a function of C
        known = {}
    given = {k: v for k, v in (("batch", batch), ("sequence", sequence)) if k in known}
    with torch.device("meta"):
        model, args, kwargs = model_and_call(_call(factory, name, **given), name)
    model = model.to("meta", dtype)
    if not args and not kwargs and "input_ids" in inspect.signature(model.forward).parameters:
        return _language_model(model, batch, sequence)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    return ModelCall(model, args, kwargs)


def _language_model(model: nn.Module, batch: int, sequence: int) -> ModelCall:
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return ModelCall(model, (), {"input_ids": ids, "labels": ids.clone()}, ids.numel())


def _configuration(name: str, entries: Mapping[str, Any]) -> Any:
    transformers = _transformers(name)
    if os.path.isfile(Path(name) / "config.json"):
        made = check_configuration(transformers, name, entries)
        make = functools.partial(transformers.AutoConfig.from_pretrained, name, **_DATA_ONLY)
    else:
        made = make = _configuration_class(transformers, name)
        check_entries(entries)
    with transformers_errors(f"transformers takes no such {made.__name__}"):
        check_known(made(), entries)
        return make(**entries)


_DATA_ONLY = {"trust_remote_code": False, "local_files_only": True}
"""What transformers is told of every directory: it is data, and all there is."""


def _configuration_class(transformers: Any, name: str) -> Any:
    with contextlib.suppress(Exception):  # a module of transformers that cannot be imported here
        made = getattr(transformers, name)
        if isinstance(made, type) and issubclass(made, transformers.PretrainedConfig):
            return made
    raise ConfigError(
        f"{name} is no directory with a config.json, no module:factory and no "
        "configuration class of transformers",
        remedy="Such a class is LlamaConfig.",
    )


def _causal_lm(config: Any, device: str) -> nn.Module:
    """A causal language model of the configuration, with the weights it is initialised with."""
    name = type(config).__name__
    transformers = _transformers(name)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{name} makes no causal language model",
            remedy="Write a module:factory that returns (model, args) for it.",
        )
    model = _built(transformers, config, "meta")
    if device != "meta":
        _refuse_larger_than_memory(model, name)
        model = _built(transformers, config, device)
    compat.choose_causal_loss(model)
    return model


def _built(transformers: Any, config: Any, device: str) -> nn.Module:
    name = type(config).__name__
    cannot = f"transformers cannot make a model of this {name}"
    with transformers_errors(cannot), bounded_modules(name), torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=False
        )
    return model


def _refuse_larger_than_memory(model: nn.Module, name: str) -> None:
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ConfigError(
            f"the weights of this {name} are {needed / 1e9:,.0f} GB, and this machine has "
            f"{there / 1e9:,.0f} GB of memory",
            remedy="Give smaller sizes, such as --option num_hidden_layers=2.",
        )


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} is of Hugging Face, and transformers is not installed",
            remedy="pip install 'autoshard[export]', or name a module:factory.",
        ) from error


# `--checkpointing`: what the layers of a model keep for backward, by transformers' own switch.


def checkpoint_layers(model: nn.Module, how: str) -> None:
    """Have each layer compute again in backward what it does not keep.

    how: "none": the model stays as it is. "full": a layer keeps its input. "selective": and the
    results of attention and of every second product. ConfigError for a model without the switch.
    """
    if how == "none":
        return
    switch = getattr(model, "activation_checkpointing_enable", None)
    if switch is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(
            f"{type(model).__name__} has no switch for activation checkpointing",
            remedy="Call torch.utils.checkpoint in the model that the factory returns.",
        )
    given: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        given["context_fn"] = _every_second_product
    switch(activation_checkpointing_kwargs=given)
    model.train()


def _every_second_product() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_keeps, [0]))  # type: ignore[no-untyped-call]


def _keeps(products: list[int], ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    if operator is torch.ops.aten.mm.default:
        products[0] += 1
        kept = products[0] % 2 == 1
    else:
        kept = "scaled_dot_product" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
