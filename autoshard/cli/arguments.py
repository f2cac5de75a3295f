"""The arguments that commands share: each has one name, one meaning and one spelling."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from autoshard.errors import ConfigError, message

_MODEL = (
    "a Hugging Face directory, a configuration class of transformers such as LlamaConfig (random "
    "weights), or module:factory, which returns a model, (model, args), (model, kwargs) or "
    "(model, args, kwargs)"
)


def shared_arguments(**defaults: Any) -> argparse.ArgumentParser:
    """The parent of a command's parser: MODEL, and of the shared flags those in `defaults`.

    A flag whose default is `...` must be given.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    for name, default in defaults.items():
        about = dict(_FLAGS[name])
        if default not in (..., None, []):
            about["help"] += f" (default {default})"
        given = {"required": True} if default is ... else {"default": default}
        parser.add_argument(f"--{name}", **about, **given)
    return parser


def mesh_sizes(text: str) -> dict[str, int]:
    """`dp_shard=2,tp=4` -> {"dp_shard": 2, "tp": 4}."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not name or not equals or not size.isdigit() or name in sizes:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mesh: {part.strip()!r}. "
                "Write each axis once, with its size: dp_shard=2,tp=4."
            )
        sizes[name] = int(size)
    return sizes


def named_value(text: str) -> tuple[str, Any]:
    """`zero=2` -> ("zero", 2): a Python literal, or a string without its quotes."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def positive(text: str) -> int:
    """An int above 0."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def options_and_entries(
    model: str, given: Sequence[tuple[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the backend in `given`, and the entries of the model's configuration.

    What is no option is an entry, where the model has a configuration; a factory has none, and
    ConfigError names the closest option.
    """
    from autoshard.config import Config
    from autoshard.model_source import is_factory

    named = dict(given)
    if "mesh" in named:
        raise ConfigError(message("--option mesh=...", remedy="The mesh is given by --mesh."))
    if is_factory(model):
        Config.from_options(named)
    known = {field.name for field in dataclasses.fields(Config)}
    options = {name: value for name, value in named.items() if name in known}
    return options, {name: value for name, value in named.items() if name not in known}


_FLAGS: dict[str, dict[str, Any]] = {
    "mesh": {"type": mesh_sizes, "metavar": "dp_shard=2,tp=4", "help": "axes and their sizes"},
    "batch": {"type": positive, "metavar": "N", "help": "sequences in a batch"},
    "sequence": {"type": positive, "metavar": "N", "help": "tokens in a sequence"},
    "dtype": {
        "choices": ("float64", "float32", "bfloat16", "float16"),
        "help": "of the parameters",
    },
    "hardware": {
        "metavar": "NAME",
        "help": "the machine to plan for: a100, h100 (default), h200, b200 or cpu",
    },
    "option": {
        "type": named_value,
        "action": "append",
        "metavar": "NAME=VALUE",
        "help": "an option of the backend (docs/options.md), such as zero=2, or an entry of the "
        "Hugging Face configuration, such as num_hidden_layers=2; may be repeated",
    },
}
