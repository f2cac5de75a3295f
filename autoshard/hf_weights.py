"""A model of a Hugging Face directory, of the class and with the weights that the directory has."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from autoshard.runtime.errors import ConfigError, message

_NAMED = 4


def load_pretrained(transformers: Any, name: str, config: Any, **options: Any) -> nn.Module:
    """The model of a directory, in the dtype it is stored in.

    Its class is the first of the configuration's `architectures`; a causal language model where it
    names none. options: for `from_pretrained`. Raises ConfigError for a class that transformers has
    not, and where a tensor of the model is not in the files, or has another size: its values would
    be random. Tensors of the files that the model has not are left out, with a warning.
    """
    made = _class(transformers, name, config)
    model, found = made.from_pretrained(
        name,
        config=config,
        dtype="auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # an error that names all of them comes below
        **options,
    )
    said = []
    if missing := found["missing_keys"]:
        said.append(f"{len(missing)} tensors of the model are not in its files ({_some(missing)})")
    if wrong := found["mismatched_keys"]:
        sizes = [f"{key}: {tuple(has)} for {tuple(wants)}" for key, has, wants in wrong]
        said.append(f"{len(wrong)} tensors have other sizes ({_some(sizes)})")
    if errors := found.get("error_msgs"):
        said.append(f"transformers says: {_some(errors)}")
    unknown = found["unexpected_keys"]
    if said:
        if unknown:
            said.append(
                f"{len(unknown)} tensors of the files are not the model's ({_some(unknown)})"
            )
        raise ConfigError(
            message(
                f"the weights of {name} are not those of {type(model).__name__}: {'; '.join(said)}",
                remedy="Name the class whose weights these are in `architectures` of config.json, "
                "or complete the files.",
            )
        )
    if unknown:
        warnings.warn(
            f"{name}: {len(unknown)} tensors of the files are no part of {type(model).__name__} "
            f"and are left out ({_some(unknown)})",
            stacklevel=2,
        )
    return model  # type: ignore[no-any-return]


def _class(transformers: Any, name: str, config: Any) -> Any:
    named = getattr(config, "architectures", None) or ()
    if not named:
        return transformers.AutoModelForCausalLM
    made = getattr(transformers, str(named[0]), None)
    if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
        raise ConfigError(
            message(
                f"{name} is a {named[0]}, a class that transformers {transformers.__version__} "
                "has not",
                remedy="Install a transformers that has it, or write a module:factory that makes "
                "the model.",
            )
        )
    return made


def _some(names: Collection[Any]) -> str:
    shown = sorted(map(str, names))[:_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > _NAMED else "")
