"""Options that are said together: a key of `options`, whose value is a dict of entries.

    options={"mesh": {"pp": 2}, "memory": {"budget": 6 * 10**9}, "pipeline": {"schedule": "zb1"}}

Each entry is a field of `Config`. Options that stand alone have the field's name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.errors import ConfigError, did_you_mean, shown


def _own(*fields: str) -> dict[str, str]:
    """Entries that have the names of their fields."""
    return {name: name for name in fields}


GROUPS: dict[str, dict[str, str]] = {
    "memory": {
        "budget": "memory_budget",
        "host": "host_memory",
        "optimizer_states": "optimizer_states",
        "chunk_loss": "chunk_loss",
    },
    "pipeline": _own("microbatches", "schedule", "virtual_stages"),
    "gradients": {
        "reduction": "gradient_reduction",
        "defer": "defer_reduction",
        "loss_tokens": "loss_tokens",
        "log": "log",
    },
    "same_inputs": {
        "batches": "batches",
        "weights": "initial_weights",
        "compare_every": "compare_every",
    },
    "planner": _own(
        *("sequence_parallel", "ep_exchange", "bucket_bytes", "fuse_collectives"),
        *("recompute_collectives", "recover_masks"),
    ),
}
"""By option: the fields of `Config` by entry."""

KEYS = {
    field: (option, entry) for option, entries in GROUPS.items() for entry, field in entries.items()
}
"""By field of `Config`: the option that it is in, and its entry there."""

REMOVED = {
    "cp_splits": (
        "cp splits the sequence, as it did by default",
        "Leave it out; dp_shard splits the batch.",
    ),
    "overlap_halves": (
        "no GPU has shown that layers on two halves of a batch are quicker",
        "Leave it out; fuse_collectives of the option planner is another way to hide collectives.",
    ),
    "small_sums": (
        "no GPU has shown that kernels over symmetric memory are quicker than NCCL",
        "Leave it out; NCCL sums, as it did by default.",
    ),
    "broadcast_inputs": (
        "what is sent to ranks and what is compared are one question",
        "Say options['same_inputs']={'batches': 'broadcast'}.",
    ),
    "check_batches": (
        "what is sent to ranks and what is compared are one question",
        "Say options['same_inputs']={'batches': 'always'}, or 'first' or 'never'.",
    ),
}
"""By name: why an option is gone, and what to do instead."""


def option(field: str) -> str:
    """How a user writes a field: `options['memory']['budget']`."""
    return "options" + "".join(f"[{key!r}]" for key in KEYS.get(field, (field,)))


def refuse_removed(names: Iterable[str]) -> None:
    """Raise ConfigError for the first name that was an option's, or is an entry of one now."""
    for name in names:
        if name in KEYS:
            group, entry = KEYS[name]
            why = f"it is the entry {entry!r} of {group!r}"
            remedy = f"Write options={{{group!r}: {{{entry!r}: ...}}}}."
        elif name in REMOVED:
            why, remedy = REMOVED[name]
        else:
            continue
        raise ConfigError(f"autoshard option {name!r} was removed: {why}", remedy=remedy)


def fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Config` that options name.

    Raises ConfigError for an entry that an option does not have, and what `entries_of` raises.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in GROUPS:
            found[name] = value
            continue
        entries = GROUPS[name]
        for entry, own in entries_of(name, value).items():
            if entry not in entries:
                others = f"Its entries are {', '.join(entries)}."
                raise ConfigError(
                    f"unknown entry {shown(entry)} of the autoshard option {name!r}",
                    remedy=did_you_mean(str(entry), entries, others, cutoff=0.5),
                )
            found[entries[entry]] = own
    return found


def entries_of(name: str, value: Any) -> Mapping[str, Any]:
    """The entries that a value of one of `GROUPS` has: a number for `memory` is its budget.

    Raises ConfigError for a value that is no dict.
    """
    if value is None:
        return {}
    if name == "memory" and type(value) is int:
        return {"budget": value}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"autoshard option {name}={shown(value)} is not allowed",
            remedy=f"It takes a dict with any of the keys {', '.join(GROUPS[name])}.",
        )
    return value


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say these fields of `Config`."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in KEYS:
            group, entry = KEYS[name]
            found.setdefault(group, {})[entry] = value
        else:
            found[name] = value
    return found
