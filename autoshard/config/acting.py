"""The axes on which each option acts, and those beside which a value of it is refused.

An option on a mesh that has none of its axes has nothing to do: docs/options.md says so, and the
program is the one without it. Entries of an option stand under the field of `Config` that they are.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.config.groups import KEYS, option
from autoshard.errors import ConfigError
from autoshard.runtime.collectives import DATA_AXES
from autoshard.runtime.mesh import AXIS_ORDER, PLANNED, SAME_BATCH


def _asks(value: Any) -> bool:
    return value not in (None, False, "auto")


@dataclass(frozen=True)
class Acting:
    """Where one option acts.

    on: the axes, of which a mesh has to have one of several ranks; none: all, and one device.
    refused: axes beside which a value for which `asks` is true is an error. needed: whether it is
    an error, too, on a mesh of several ranks that names no axis of `on`. part: the key of the
    option's value that this is about; empty: all of it.
    """

    on: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    needed: bool = False
    asks: Callable[[Any], bool] = _asks
    part: str = ""

    def acts(self, sizes: Mapping[str, int]) -> bool:
        """Whether the option has something to do on a mesh of these sizes."""
        return not self.on or any(sizes.get(axis, 1) > 1 for axis in self.on)

    def text(self) -> str:
        """The entry of the table in docs/options.md."""
        found = "any" if not self.on else "several ranks" if self.on == AXIS_ORDER else ""
        found = found or ", ".join(self.on)
        if self.needed:
            return f"{found}, else an error"
        return f"{found}; not beside {', '.join(self.refused)}" if self.refused else found


_GATHERS = (*DATA_AXES, "cp")  # axes over which weights are gathered or reduced
_NOT_PP = Acting(refused=("pp",))

ACTING: dict[str, Acting] = {
    "mesh": Acting(),
    "zero": Acting(("dp_shard", "ep", "cp")),  # cp beside tp stores weights as dp_shard does
    "defer_reduction": Acting(("dp_shard", "ep")),
    "sequence_parallel": Acting(PLANNED),
    "ep_exchange": Acting(("ep",)),
    "inner": Acting(refused=("pp",), asks=lambda value: value == "tensorrt"),
    "plan": Acting(),
    "precision": Acting(refused=("pp", "cp", "ep"), part="matmul"),
    "gradient_reduction": Acting(DATA_AXES),
    "memory_budget": Acting(),
    "host_memory": _NOT_PP,
    "optimizer_states": Acting(),
    "bucket_bytes": Acting(_GATHERS),
    "outputs": Acting(PLANNED, refused=("pp",), asks=lambda value: value != "lazy"),
    "rng": Acting(refused=("pp",), asks=lambda value: value == "tracker"),
    "fuse_collectives": Acting(("tp",), refused=("pp",)),
    "cuda_graphs": _NOT_PP,
    "inductor": _NOT_PP,
    "recompute_collectives": Acting(PLANNED),
    "recover_masks": Acting(),
    "loss_tokens": Acting(DATA_AXES),
    "log": Acting(),
    "chunk_loss": _NOT_PP,
    "batches": Acting(SAME_BATCH),
    "timeout": Acting(AXIS_ORDER),
    "initial_weights": Acting(AXIS_ORDER),
    "compare_every": Acting((*DATA_AXES, "pp")),
    "microbatches": Acting(("pp",), needed=True),
    "schedule": Acting(("pp",), needed=True),
    "virtual_stages": Acting(("pp",), needed=True),
    "strict": Acting(PLANNED, refused=("pp",)),
}


def refuse(values: Mapping[str, Any], given: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Raise ConfigError for an option that the mesh does not obey.

    values: of the options by name. given: the sizes of the mesh that the caller named, none where
    it was chosen. sizes: of the mesh there is.
    """
    spelled = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    for name, acting in ACTING.items():
        value = values[name]
        if not acting.asks(value):
            continue
        entry = acting.part or KEYS.get(name, ("", name))[1]
        part = f"[{acting.part!r}]" if acting.part else ""
        shown = f"{option(name)}{part}={reprlib.repr(value)}"
        beside = next((axis for axis in acting.refused if sizes.get(axis, 1) > 1), None)
        if beside is not None:
            raise ConfigError(
                f"{shown} beside {beside} in the mesh is not supported yet",
                remedy=f"Leave {entry} out, or {beside}.",
            )
        if acting.needed and math.prod(given.values()) > 1 and not set(acting.on) & set(given):
            raise ConfigError(
                f"{shown} is about {', '.join(acting.on)}, of which the mesh {spelled} has none",
                remedy=f"Leave {entry} out, or give the mesh {acting.on[0]}.",
            )
