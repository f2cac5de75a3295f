"""A Hugging Face configuration, checked before transformers acts on it: no code, no endless sizes.

A directory is data here. Code that it brings or names (`auto_map`, kernels of a repository) is
never run, and nobody is asked; a size that would take hours to build is refused before anything is
built.

A model of a Hugging Face directory, of the class and with the weights that the directory has.
"""

import contextlib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from autoshard.runtime.errors import AutoshardError, ConfigError, did_you_mean
from autoshard.runtime.files import FileEntry, read_json

MOST_LAYERS = 4096
"""Layers, blocks or experts in one count; the deepest published models have a thousand."""

MOST_LABELS = 2**20
MOST_SIZE = 2**31 - 1
MOST_MODULES = 500_000
"""Modules of a model that is built; a mixture with a module an expert has some 60,000."""

_COUNT = re.compile(r"(^|_)(layers?|blocks|depths?|experts|stages)$")
_SIZE = re.compile(r"(size|dim|positions|embeddings|vocab|embd|ctx|inner|heads?|channels)$")
_REMEDY = "A module:factory that makes the model has no such bounds."
_WITHOUT_CODE = (
    "autoshard never runs code that a directory brings (trust_remote_code is False). Name a "
    "module:factory of your own that makes the model."
)


def check_configuration(
    transformers: Any, directory: str | Path, entries: Mapping[str, Any]
) -> Any:
    """The class of a directory's configuration; ConfigError for what must not be built from it.

    entries: of the user's, in place of its own.
    """
    path = Path(directory) / "config.json"
    body = read_json(path, "configuration", ConfigError)
    check_entries({name: entry.value for name, entry in body.entries().items()}, str(path))
    check_entries(entries)
    known = transformers.CONFIG_MAPPING
    kind = body.entry("model_type")
    if kind.text() not in known:
        own = "auto_map" in body.entries()
        meant = did_you_mean(kind.text(), known.keys(), "")
        raise ConfigError(
            f"{path} is of the model_type {kind.text()!r:.80}, which transformers "
            f"{transformers.__version__} does not know{': its code is its own' * own}",
            remedy=_WITHOUT_CODE if own else f"Install a release that has it. {meant}".rstrip(),
        )
    return known[kind.text()]


def check_entries(entries: Mapping[str, Any], file: str = "of --option") -> None:
    """Refuse counts and sizes that no model has, and names of code to fetch."""
    whole = FileEntry(dict(entries), file, "configuration", ConfigError, _REMEDY)
    for name, entry in _named(whole):
        values = entry.value if isinstance(entry.value, list) else [entry.value]
        numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
        for number in numbers:
            if _COUNT.search(name) and not 0 <= number <= MOST_LAYERS:
                raise entry.refused(f"not from 0 to {MOST_LAYERS:,}")
            if name == "num_labels" and not 0 <= number <= MOST_LABELS:
                raise entry.refused(f"not from 0 to {MOST_LABELS:,}")
            if _SIZE.search(name) and abs(number) > MOST_SIZE:
                raise entry.refused(f"not a size up to {MOST_SIZE:,}")
            if name in ("hidden_size", "vocab_size") and number < 1:
                raise entry.refused("not a size from 1")
        if _COUNT.search(name) and sum(numbers) > MOST_LAYERS:
            raise entry.refused(f"more than {MOST_LAYERS:,} in all")
        if "implementation" in name:
            texts = entry.value.values() if isinstance(entry.value, dict) else [entry.value]
            if any(isinstance(text, str) and re.search(r"[/:|]", text) for text in texts):
                raise entry.refused("the code of a repository: autoshard runs none of it")


def check_known(default: Any, entries: Mapping[str, Any]) -> None:
    """Refuse an entry that a configuration of `default`'s class has not: it would keep anything."""
    for name in entries:
        found = getattr(default, name, None)
        if name.startswith("_") or callable(found) or not hasattr(default, name):
            what = f"{type(default).__name__} has no entry {name!r}"
            remedy = did_you_mean(name, default.to_dict(), "")
            raise ConfigError(what, remedy=remedy)


@contextlib.contextmanager
def transformers_errors(what: str) -> Iterator[None]:
    """A block in which transformers works on what it was given: its errors are ConfigErrors."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        said = said if len(said) < 600 else said[:600] + " ..."
        text = f"{what}: {type(error).__name__}: {said.rstrip('.')}"
        raise ConfigError(text) from error


@contextlib.contextmanager
def bounded_modules(what: str) -> Iterator[None]:
    """A block that builds one model: at more than MOST_MODULES modules it ends with ConfigError."""
    count = 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise ConfigError(f"{what} has more than {MOST_MODULES:,} modules", remedy=_REMEDY)

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _named(entry: FileEntry) -> Iterator[tuple[str, FileEntry]]:
    """Every named entry at any depth."""
    left = [entry]
    while left:
        one = left.pop()
        if isinstance(one.value, list):
            left += [item for item in one.items() if isinstance(item.value, (dict, list))]
        elif isinstance(one.value, dict):
            for name, inner in one.entries().items():
                yield name, inner
                left.append(inner)


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
            f"the weights of {name} are not those of {type(model).__name__}: {'; '.join(said)}",
            remedy="Name the class whose weights these are in `architectures` of config.json, "
            "or complete the files.",
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
            f"{name} is a {named[0]}, a class that transformers {transformers.__version__} has not",
            remedy="Install a transformers that has it, or write a module:factory that makes "
            "the model.",
        )
    return made


def _some(names: Collection[Any]) -> str:
    shown = sorted(map(str, names))[:_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > _NAMED else "")
