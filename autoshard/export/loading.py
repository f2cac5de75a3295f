"""Models by name, for the command line: a Hugging Face directory, or `module:factory`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from autoshard.export.errors import export_error


def load_model(source: str) -> nn.Module:
    """The model that `source` names, on the CPU, in the dtype it is stored in.

    source: a directory with a `config.json` (needs transformers), or `module:factory`, a callable
    without arguments that returns a module; modules of the working directory are found too.
    """
    if (Path(source) / "config.json").is_file():
        return _pretrained(source)
    name, colon, attribute = source.partition(":")
    if not colon:
        raise export_error(f"{source} is neither a directory with a config.json nor module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise export_error(f"{source} cannot be found: {error}") from error
    model = factory()
    if not isinstance(model, nn.Module):
        raise export_error(f"{source} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a Hugging Face directory, or None where it has none."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((Path(source) / name).is_file() for name in names):
        return None
    return _transformers().AutoTokenizer.from_pretrained(source)


def _pretrained(source: str) -> nn.Module:
    loaded: nn.Module = _transformers().AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    return loaded


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise export_error(
            "a Hugging Face directory needs transformers, which is not installed",
            remedy="pip install 'autoshard[export]'",
        ) from error
