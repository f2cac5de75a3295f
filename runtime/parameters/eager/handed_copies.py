"""Gathered parameters that graphs hand to code outside of them: a write to one would be lost.

Where `f(self.weight)` leaves the graph (`f` is disabled, or breaks it), `f` gets the value that the
graph has of the weight, which is a gathered copy unless the rank holds the whole. The copies of a
graph are kept until the next graph runs, which finds the writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, message

_PLAIN = (torch.Tensor, nn.Parameter)
_kept: list[tuple[torch.Tensor, int, str]] = []


def keep_copies(outputs: Sequence[Any], parameters: Mapping[int, tuple[str, Any]]) -> None:
    """parameters: name and stored tensor of each output that is a parameter as it was read, or a
    view of it."""
    for position, (name, stored) in parameters.items():
        copy = outputs[position]
        if copy.is_inference():  # counts no writes
            continue
        own = compat.local_of(stored).untyped_storage().data_ptr()
        # a part that is gathered when it is read (a subclass) has no storage of the whole
        if type(copy) not in _PLAIN or copy.untyped_storage().data_ptr() != own:
            _kept.append((copy, compat.writes_to(copy), name))


def check_copies() -> None:
    """Raise AutoshardError where a copy was written to since it was handed out."""
    if not _kept:
        return
    written = [name for copy, writes, name in _kept if compat.writes_to(copy) != writes]
    _kept.clear()
    if written:
        raise AutoshardError(
            message(
                f"code outside of the graph wrote to {', '.join(written)}, which the graph had "
                "handed to it as a gathered copy: the parameter has not changed",
                remedy="Hand the module over and write to its parameter there "
                "(f(module) and module.weight in place of f(self.weight)).",
            )
        )
