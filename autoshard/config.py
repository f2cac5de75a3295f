"""The options of the backend, validated: nothing a user asks for is silently ignored."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import ConfigError, message
from autoshard.planning.plan import Plan
from autoshard.runtime.mesh import AXIS_ORDER

#: Option -> does the value ask for something this version cannot do? The one place to shrink as
#: the version grows; a value found here is an error, never a quiet fallback.
UNAVAILABLE: dict[str, Callable[[Any], bool]] = {
    "precision": lambda precision: precision is not None,
    "rng": lambda rng: rng != "invariant",
}


def axis_sizes(mesh: DeviceMesh | Mapping[str, int] | None) -> dict[str, int]:
    """Sizes by axis name, in the mesh's order; empty where the mesh is left to be chosen."""
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or [f"unnamed {i}" for i in range(mesh.ndim)]
        return dict(zip(names, mesh.shape))
    return dict(mesh or {})


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_mesh(value: object) -> bool:
    if isinstance(value, DeviceMesh):
        names = value.mesh_dim_names or ()
        return bool(names) and set(names) <= set(AXIS_ORDER)
    if isinstance(value, Mapping):
        return set(value) <= set(AXIS_ORDER) and all(map(_is_positive_int, value.values()))
    return value is None


def _option(default: Any, values: str, check: Callable[[Any], bool], doc: str) -> Any:
    return dataclasses.field(
        default=default, metadata={"values": values, "check": check, "doc": doc}
    )


def _flag(default: bool, doc: str) -> Any:
    return _option(default, "True or False", lambda value: isinstance(value, bool), doc)


def _choice(default: Any, choices: tuple[Any, ...], doc: str) -> Any:
    values = " or ".join((", ".join(map(repr, choices[:-1])), repr(choices[-1])))
    # `True in (1, 2, 3)` holds, so the type is compared too.
    return _option(
        default, values, lambda v: any(type(v) is type(c) and v == c for c in choices), doc
    )


def _bytes(doc: str) -> Any:
    return _option(
        None,
        "a positive number of bytes (int), or None",
        lambda value: value is None or _is_positive_int(value),
        doc,
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """What `torch.compile(model, backend="autoshard", options={...})` accepts.

    Every field is an option; its meaning stands beside it (and in `Config.table()`). Raises
    `ConfigError` for a value that is not allowed, or that this version cannot obey. Whether the
    mesh fits the world is checked where the mesh is made (`runtime.mesh.init_mesh`).
    """

    mesh: DeviceMesh | Mapping[str, int] | None = _option(
        None,
        f"a dict of axis name ({', '.join(AXIS_ORDER)}) to positive int, a DeviceMesh with "
        "dimensions of those names, or None",
        _is_mesh,
        "The device mesh, or its sizes by axis name. None: one `tp` axis over the whole world.",
    )
    zero: int = _choice(
        3,
        (1, 2, 3),
        "Parameters are sharded over `dp_shard`; 3 gathers a weight again for backward, 1 and 2 "
        "keep it since forward.",
    )
    sequence_parallel: bool = _flag(
        True, "Let the planner shard activations over the sequence; False forbids it."
    )
    inner: str = _choice(
        "inductor",
        ("inductor", "aot_eager", "eager"),
        "What compiles the rank's program after sharding.",
    )
    plan: Plan | str | os.PathLike[str] | None = _option(
        None,
        "a Plan, the path of a saved one, or None",
        lambda value: value is None or isinstance(value, (Plan, str, os.PathLike)),
        "A plan to follow instead of searching for one.",
    )
    precision: Mapping[str, Any] | None = _option(
        None,
        "a dict with any of the keys param, compute, reduce, or None",
        lambda value: (
            value is None
            or (isinstance(value, Mapping) and set(value) <= {"param", "compute", "reduce"})
        ),
        "Dtypes of stored parameters, of computation and of gradient reductions.",
    )
    memory_budget: int | None = _bytes("Bytes a rank may use; the planner shards until it fits.")
    bucket_bytes: int | None = _bytes(
        "A bucket of merged collectives closes at this size; None: 40 million elements."
    )
    outputs: str = _choice(
        "lazy",
        ("lazy", "replicate", "dtensor"),
        "What a sharded output becomes: gathered at its first use, at once, or a DTensor.",
    )
    rng: str = _choice(
        "invariant",
        ("invariant", "tracker"),
        "Dropout that does not depend on the mesh, or one random stream an axis.",
    )
    broadcast_inputs: bool = _flag(False, "Send rank 0's batch to its tp group at each call.")
    check_batches: str = _choice(
        "first",
        ("first", "always", "never"),
        "Compare the batches of the ranks of a tp group at the first two calls of each graph, or "
        "at all of them.",
    )
    timeout: float = _option(
        600.0,
        "a positive number of seconds",
        lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0,
        "How long a rank waits for the others to compile, or to compare batches, before an error.",
    )
    initial_weights: str = _choice(
        "broadcast",
        ("broadcast", "trust"),
        "Take rank 0's initial weights, or trust that all ranks hold the same.",
    )
    strict: bool = _flag(
        False, "Make it an error that an operator or a parameter could not be sharded."
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not field.metadata["check"](value):
                raise ConfigError(
                    message(
                        f"autoshard option {field.name}={_show(value)} is not allowed",
                        remedy=f"It takes {field.metadata['values']}.",
                    )
                )
            if field.name in UNAVAILABLE and UNAVAILABLE[field.name](value):
                raise ConfigError(
                    message(
                        f"autoshard option {field.name}={_show(value)} is not available in this "
                        "version",
                        remedy=f"Only {field.default!r} is.",
                    )
                )

    def lines(self) -> list[str]:
        """The options that must be the same on all ranks, one a line.

        The mesh and the plan are compared by what they come to.
        """
        own = ("mesh", "plan", "timeout")
        names = [field.name for field in dataclasses.fields(self) if field.name not in own]
        return [f"option {name}: {getattr(self, name)!r}" for name in names]

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Config:
        """The Config of an options dict; an unknown option is an error naming the closest one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options or {}:
            if name not in names:
                closest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
                raise ConfigError(
                    message(
                        f"unknown autoshard option {name!r}",
                        remedy=f"Did you mean {closest[0]!r}?"
                        if closest
                        else f"The options are {', '.join(names)}.",
                    )
                )
        return cls(**dict(options or {}))

    @classmethod
    def table(cls) -> str:
        """The options as a Markdown table: name, default, allowed values, meaning."""
        rows = ["| option | default | takes | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(cls):
            values, doc = field.metadata["values"], field.metadata["doc"]
            only = f" Now only {field.default!r}." if field.name in UNAVAILABLE else ""
            rows.append(f"| `{field.name}` | `{field.default!r}` | {values} | {doc}{only} |")
        return "\n".join(rows)


def _show(value: Any) -> str:
    return str(axis_sizes(value)) if isinstance(value, DeviceMesh) else repr(value)
