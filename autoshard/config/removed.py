"""Options that were there once."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.errors import ConfigError, message

REMOVED = {
    "cp_splits": (
        "cp splits the sequence, as it did by default",
        "Leave it out; dp_shard splits the batch.",
    ),
    "overlap_halves": (
        "no GPU has shown that layers on two halves of a batch are quicker",
        "Leave it out; fuse_collectives=True is another way to hide collectives on tp.",
    ),
    "small_sums": (
        "no GPU has shown that kernels over symmetric memory are quicker than NCCL",
        "Leave it out; NCCL sums, as it did by default.",
    ),
}
"""By name: why an option is gone, and what to do instead."""


def refuse_removed(names: Iterable[str]) -> None:
    """Raise ConfigError for the first name that was an option's."""
    for name in names:
        if name in REMOVED:
            why, remedy = REMOVED[name]
            raise ConfigError(
                message(f"autoshard option {name!r} was removed: {why}", remedy=remedy)
            )
