"""What commands share: arguments, each of which has one name, one meaning and one spelling, and how
far they are, on stderr."""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.errors import ConfigError
from autoshard.runtime.files import MOST_RANKS

if TYPE_CHECKING:
    from autoshard.mesh_search import MeshSearch

_MODEL = (
    "a Hugging Face directory (no code of its own is run), a configuration class of transformers "
    "such as LlamaConfig (random weights), or module:factory, which returns a model, (model, "
    "args), (model, kwargs) or (model, args, kwargs)"
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
        if not name or not equals or name in sizes or not _whole(size, MOST_RANKS):
            raise argparse.ArgumentTypeError(
                f"{_short(text)} is no mesh: {_short(part.strip())}. "
                "Write each axis once, with its size: dp_shard=2,tp=4."
            )
        sizes[name] = int(size)
    if math.prod(sizes.values()) > MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{_short(text)} is no mesh: more than {MOST_RANKS:,} ranks."
        )
    return sizes


def named_value(text: str) -> tuple[str, Any]:
    """`zero=2` -> ("zero", 2): a Python literal, or a string without its quotes."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{_short(text)} is not NAME=VALUE")
    try:
        with warnings.catch_warnings(action="ignore"):  # such as an escape that means nothing
            return name, ast.literal_eval(value)
    except (MemoryError, RecursionError):
        raise argparse.ArgumentTypeError(f"{_short(text)} is nested too deeply") from None
    except (SyntaxError, TypeError, ValueError):
        return name, value


def positive(text: str, most: int = 2**63 - 1) -> int:
    """An int above 0, and at most `most`."""
    if not _whole(text, most):
        bound = f" up to {most:,}" if text.isdecimal() and int(text[:20]) else ""
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a positive number{bound}")
    return int(text)


def world_size(text: str) -> int:
    """A number of ranks."""
    return positive(text, MOST_RANKS)


def batch_size(text: str) -> int:
    """A number of sequences, or of tokens in one."""
    return positive(text, 2**24)


def seed(text: str) -> int:
    """A seed of torch's generators."""
    return 0 if text == "0" else positive(text)


def finite(text: str) -> float:
    """A number from 0, neither infinite nor NaN."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a number from 0")
    return number


def _whole(text: str, most: int) -> bool:
    """Whether `text` spells an int from 1 to `most` in the digits 0 to 9."""
    return re.fullmatch("0*[1-9][0-9]{0,18}", text) is not None and int(text) <= most


def _short(text: str) -> str:
    return repr(text if len(text) < 80 else text[:80] + "...")


def options_and_entries(
    model: str, given: Sequence[tuple[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the backend in `given`, and the entries of the model's configuration.

    What is no option is an entry, where the model has a configuration; a factory has none, and
    ConfigError names the closest option.
    """
    from autoshard.config import GROUPS, Config, entries_of, refuse_removed
    from autoshard.model_source import is_factory

    named: dict[str, Any] = {}
    for name, value in given:
        group, dot, entry = name.partition(".")
        if group in GROUPS:
            entries = {entry: value} if dot else entries_of(group, value)
            named[group] = {**named.get(group, {}), **entries}
        else:
            named[name] = value
    if "mesh" in named:
        raise ConfigError("--option mesh=...", remedy="The mesh is given by --mesh.")
    refuse_removed(named)
    if is_factory(model):
        Config.from_options(named)
    known = Config.names()
    options = {name: value for name, value in named.items() if name in known}
    return options, {name: value for name, value in named.items() if name not in known}


def with_fields(options: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Options with other fields of `Config`; None: without them."""
    from autoshard.config import fields_of, nested

    given = {**fields_of(options), **fields}
    return nested({name: value for name, value in given.items() if value is not None})


def roomier(options: Mapping[str, Any], found: MeshSearch) -> Iterator[dict[str, Any]]:
    """Options for where activations alone keep every mesh from fitting, the dearest last: logits
    that the model returns are withheld, then values wait on the host, of whose memory a rank has as
    much as a device has. What `options` name stays."""
    from autoshard.config import fields_of

    given, more, device = fields_of(options), dict[str, Any](), found.cluster.device
    limit = given.get("memory_budget") or found.cluster.usable_bytes
    least = min((row.memory.total - row.memory.activations for row in found.rows), default=limit)
    if found.best is not None or least >= limit:
        return
    host = int(device.memory_bytes) if device.host is not None else None
    for name, value in (("chunk_loss", True), ("host_memory", host)):
        if value is not None and given.get(name) in (None, "auto"):
            more[name] = value
            yield with_fields(options, **more)


_FLAGS: dict[str, dict[str, Any]] = {
    "mesh": {"type": mesh_sizes, "metavar": "dp_shard=2,tp=4", "help": "axes and their sizes"},
    "batch": {"type": batch_size, "metavar": "N", "help": "sequences in a batch"},
    "sequence": {"type": batch_size, "metavar": "N", "help": "tokens in a sequence"},
    "dtype": {
        "choices": ("float64", "float32", "bfloat16", "float16"),
        "help": "of the parameters",
    },
    "hardware": {
        "metavar": "NAME",
        "help": "the machine to plan for: a100, h100 (default), h200, b200, cpu, or a file",
    },
    "option": {
        "type": named_value,
        "action": "append",
        "metavar": "NAME=VALUE",
        "help": "an option of the backend (docs/options.md), such as zero=2 or "
        "memory.budget=6000000000, or an entry of the Hugging Face configuration, such as "
        "num_hidden_layers=2; may be repeated",
    },
}


LINES = 20
"""The most lines, or one more, that a pipe is sent for one piece of work."""


class ProgressLine:
    """`[done/total] what`: one line that is rewritten on a terminal, a few lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        last = done == total
        if not self._terminal and not last and done % max(1, total // LINES):
            return
        start = "\r\x1b[K" if self._terminal else ""
        end = "" if self._terminal and not last else "\n"
        print(f"{start}[{done}/{total}] {what}", end=end, file=sys.stderr, flush=True)


def imbalance(text: str) -> float:
    """Rows of the fullest rank by those of the mean, which are no fewer."""
    found = float(text)
    if not 1 <= found <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not from 1, of experts chosen evenly, to 1e6")
    return found


def assumed(found: MeshSearch, imbalance: float) -> str:
    """What prices assume of the machine's programs and of experts, where nobody said it."""
    known, name = found.cluster.assumed, found.cluster.name
    said = f"; efficiencies that {name} leaves out are those of {known}" if known else ""
    travels = any("ep" in row.timing.traffic for row in found.rows)
    return said + "; experts are chosen evenly" * (travels and imbalance == 1)
