"""Models by name, for the command line: a Hugging Face directory, or `module:factory`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from autoshard.export.errors import export_error
from autoshard.names import callable_named, model_and_call


def load_model(source: str) -> nn.Module:
    """The model that `source` names, on the CPU, in the dtype it is stored in.

    source: a directory with a `config.json` (needs transformers), or `module:factory`, a callable
    without arguments that returns a module; modules of the working directory are found too.
    """
    if (Path(source) / "config.json").is_file():
        return _pretrained(source)
    if ":" not in source:
        raise export_error(f"{source} is neither a directory with a config.json nor module:factory")
    return model_and_call(callable_named(source)(), source)[0]


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
