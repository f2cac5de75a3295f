"""The options of the backend, checked: nothing a user asks for is silently ignored."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.config.acting import ACTING, refuse
from autoshard.config.groups import GROUPS, KEYS, fields_of, option, refuse_removed
from autoshard.errors import ConfigError, did_you_mean, shown
from autoshard.planning import Plan
from autoshard.runtime.mesh import AXIS_ORDER
from autoshard.runtime.operators import FLOAT8_RECIPES

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16)}
_DTYPES["float16"] = torch.float16


@dataclasses.dataclass(frozen=True)
class Precision:
    """What a model stored in one dtype (fp32, usually) is computed and reduced in.

    param: parameters are gathered, and computed with, in this dtype; the model is traced as if its
        parameters had it. None: as they are stored. Inputs and buffers are left alone: floating
        inputs come from the caller in the dtype that the model's operators accept.
    reduce: gradients travel over the data-parallel axes in this dtype; None: the dtype of compute.
    accumulate: the ranks' gradients are summed in this dtype; None: whatever the collective does.
        Where it differs from `reduce`, they move by an all-to-all and each rank sums its part.
    matmul: products of activations with parameters run in float8, in training ("float8": a scale a
        tensor; "float8_rowwise": one a row); None: in the dtype of compute.

    Gradients and optimizer state always have the dtype of the stored parameter. The names are
    those of FSDP2's MixedPrecisionPolicy without `_dtype`; dtypes may be given by name.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    matmul: str | None = None

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "accumulate"):
            object.__setattr__(self, name, _dtype(getattr(self, name)))
        if self.matmul is not None and self.matmul not in FLOAT8_RECIPES:
            raise ValueError(f"{self.matmul!r} is not one of {', '.join(FLOAT8_RECIPES)}")

    @staticmethod
    def of(value: Precision | Mapping[str, Any] | None) -> Precision:
        """From the value of the option. Raises TypeError or ValueError where it is not allowed."""
        return value if isinstance(value, Precision) else Precision(**dict(value or {}))

    @staticmethod
    def accepts(value: Any) -> bool:
        """Whether `of` takes the value."""
        try:
            Precision.of(value)
        except (TypeError, ValueError):
            return False
        return True


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or value in _DTYPES.values():
        return value
    if isinstance(value, str) and value in _DTYPES:
        return _DTYPES[value]
    raise ValueError(f"{value!r} is not one of {', '.join(_DTYPES)}")


def axis_sizes(mesh: DeviceMesh | Mapping[str, int] | None) -> dict[str, int]:
    """Sizes by axis name, in the mesh's order; empty where the mesh is left to be chosen."""
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or [f"unnamed {i}" for i in range(mesh.ndim)]
        return dict(zip(names, mesh.shape))
    return dict(mesh or {})


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


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


def _count(what: str, doc: str) -> Any:
    return _option(None, f"{what}, or None", lambda v: v is None or _is_positive_int(v), doc)


def _bytes(doc: str) -> Any:
    return _count("a positive number of bytes (int)", doc)


@dataclasses.dataclass(frozen=True)
class Config:
    """What `torch.compile(model, backend="autoshard", options={...})` accepts.

    Every field is an option, or an entry of one (`GROUPS`); its meaning stands beside it (and in
    `Config.table()`). Raises `ConfigError` for a value that is not allowed, or that this version
    cannot obey. Whether the mesh fits the world is checked where the mesh is made
    (`runtime.mesh.init_mesh`).
    """

    mesh: DeviceMesh | Mapping[str, int] | None = _option(
        None,
        f"a dict of axis name ({', '.join(AXIS_ORDER)}) to positive int, a DeviceMesh with "
        "dimensions of those names, or None",
        _is_mesh,
        "The device mesh, or its sizes by axis name. None: that of `plan`, or chosen at the first "
        "call (planning.md).",
    )
    zero: int | str = _choice(
        3,
        (1, 2, 3, "auto"),
        "Parameters are sharded over `dp_shard`; 3 gathers a weight again for backward, 1 and 2 "
        "keep it since forward; in `no_sync`, 1 keeps whole gradients, 2 and 3 their shards. "
        "'auto' chooses for each weight, together with its plan (data_parallel.md).",
    )
    defer_reduction: bool = _flag(
        False,
        "In `no_sync`, keep whole gradients under zero=2 and 3 too, and reduce them once, instead "
        "of once a microbatch.",
    )
    sequence_parallel: bool = _flag(
        True, "Let the planner shard activations over the sequence; False forbids it."
    )
    ep_exchange: str = _choice(
        "auto",
        ("auto", "rows", "weights"),
        "What travels over `ep` for a mixture of experts: 'rows' to their experts wherever they "
        "can, the experts' 'weights' to the rows, or, for each mixture and together with the plan, "
        "whichever is cheaper (experts.md).",
    )
    inner: str = _choice(
        "inductor",
        ("inductor", "aot_eager", "eager", "tensorrt"),
        "What compiles the rank's program after sharding; tensorrt: torch-tensorrt, for inference "
        "(export.md).",
    )
    plan: Plan | str | os.PathLike[str] | None = _option(
        None,
        "a Plan, the path of a saved one, or None",
        lambda value: value is None or isinstance(value, (Plan, str, os.PathLike)),
        "A plan to follow, or what `autoshard compile` wrote (first_step.md), instead of a search.",
    )
    precision: Precision | Mapping[str, Any] | None = _option(
        None,
        "a Precision, a dict with any of the keys param, reduce, accumulate to floating dtypes "
        "or their names, and matmul to 'float8' or 'float8_rowwise', or None",
        Precision.accepts,
        "Dtypes in which parameters are gathered and computed with, gradients travel over the "
        "data-parallel axes, and the ranks' gradients are summed; None: those of the model. "
        "matmul: products in float8 (float8.md).",
    )
    gradient_reduction: str = _choice(
        "average",
        ("average", "sum"),
        "Gradients are the mean over the data-parallel ranks, or the sum.",
    )
    memory_budget: int | None = _bytes(
        "Bytes a rank may hold at the peak of a step: what does not fit is computed again in "
        "backward, or sharded further (memory.md). None: on a GPU, 92% of its memory."
    )
    host_memory: int | None = _bytes(
        "Bytes of its host's memory in which a rank may keep values from forward to backward where "
        "a memory budget asks for it (memory.md). None: it keeps none there."
    )
    optimizer_states: str = _choice(
        "device",
        ("device", "host"),
        "Where `memory.budget` and the choice of a mesh count an optimizer's states; host: with "
        "`autoshard.offload_optimizer`, which keeps them there (memory.md).",
    )
    bucket_bytes: int | None = _bytes(
        "Size of a bucket of collectives; None: 40 million elements, or a million a rank where "
        "that is more, but at most an eighth of the model."
    )
    outputs: str = _choice(
        "lazy",
        ("lazy", "sharded", "replicate", "dtensor"),
        "What a sharded output becomes: gathered at its first use ('sharded': by no graph either, "
        "where all ranks read it, or none), at once, or a DTensor.",
    )
    rng: str = _choice(
        "invariant",
        ("invariant", "tracker"),
        "Random numbers that do not depend on the mesh, or one random state a rank.",
    )
    fuse_collectives: bool | str = _choice(
        False,
        (False, "auto", True),
        "Whether gathers and reduce-scatters of activations are one operator with the products "
        "beside them: 'auto' where that is predicted, and measured, to be quicker, on GPUs of one "
        "machine (overlap.md). No GPU has run it yet.",
    )
    cuda_graphs: bool = _flag(
        False,
        "Capture the kernels and collectives of a program as a CUDA graph, and replay it "
        "(cuda_graphs.md).",
    )
    inductor: Mapping[str, Any] | None = _option(
        None,
        "a dict of names in torch._inductor.config to values, or None",
        lambda v: v is None or (isinstance(v, Mapping) and all(type(k) is str for k in v)),
        "Settings of Inductor for these programs; without options, torch.compile's `mode` sets "
        "them.",
    )
    recompute_collectives: str = _choice(
        "gathers",
        ("gathers", "all", "none"),
        "Which collectives inside a checkpointed region run again in backward; the results of the "
        "others are kept.",
    )
    recover_masks: bool = _flag(
        True,
        "Attention with a dense mask that is proven causal runs without it (attention.md).",
    )
    loss_tokens: str = _choice(
        "local",
        ("local", "global"),
        "A mean loss in the model is over a data-parallel rank's own tokens, or over those of all "
        "ranks.",
    )
    log: str | None = _option(
        None,
        "a path, or None",
        lambda value: value is None or (isinstance(value, str) and bool(value)),
        "A file in which the first rank writes the loss and the norm of gradients of each "
        "backward, for `autoshard verify --against` (verification.md).",
    )
    chunk_loss: bool | str = _choice(
        "auto",
        (False, "auto", True),
        "Logits and their cross entropy go by chunks of rows, and are never whole (losses.md): "
        "'auto' where they are no output and a step would not fit its memory otherwise, or, where "
        "that is not known, where it spares 1 GiB a rank; True always, and outputs that are "
        "logits are withheld in training.",
    )
    batches: str = _choice(
        "first",
        ("first", "always", "never", "broadcast"),
        "Compare the batches of the ranks of a tp or cp group at the first two calls of each "
        "graph, or at all of them, or at none; or send rank 0's at each call, and compare shapes.",
    )
    timeout: float | None = _option(
        None,
        "a positive number of seconds, less than 2**31, or None",
        lambda v: v is None or (type(v) in (int, float) and 0 < v < 2**31),
        "How long a rank waits for the others, to compile, to compare batches or in a collective, "
        "before an error; None: as long as the process group does.",
    )
    initial_weights: str = _choice(
        "broadcast",
        ("broadcast", "trust"),
        "Take rank 0's initial weights and buffers, or trust that all ranks hold the same; buffers "
        "are compared.",
    )
    compare_every: int = _option(
        256,
        "a positive int",
        _is_positive_int,
        "Calls of graphs, in the long run, between comparisons of all so far: 16 bytes a time.",
    )
    microbatches: int | None = _count(
        "a positive int",
        "Parts in which a pipeline (`pp` in the mesh) runs a batch; None: four a stage, or the "
        "largest divisor of the batch below that; one where the model joins samples.",
    )
    schedule: str | None = _choice(
        None,
        ("1f1b", "gpipe", "interleaved", "zb1", None),
        "The order of forwards and backwards on the stages of a pipeline (pipeline.md); None: that "
        "of `plan`, or '1f1b'.",
    )
    virtual_stages: int | None = _count(
        "a positive int",
        "Stages of each rank of a pipeline with schedule='interleaved'; None: two.",
    )
    strict: bool = _flag(
        False, "Make it an error that an operator or a parameter could not be sharded."
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not field.metadata["check"](value):
                raise ConfigError(
                    f"autoshard option {_name(field.name)}={_show(value)} is not allowed",
                    remedy=f"It takes {field.metadata['values']}.",
                )
        for name in ("cuda_graphs", "inductor"):
            if getattr(self, name) and self.inner != "inductor":
                raise ConfigError(
                    f"options['{name}'] is about Inductor, and inner is {self.inner!r}",
                    remedy=f"Leave out {name}, or inner.",
                )
        if self.fuse_collectives is True and self.inner in ("eager", "tensorrt"):
            raise ConfigError(
                f"{option('fuse_collectives')} is True, and inner={self.inner!r} has no graph "
                "in which collectives are fused",
                remedy="Leave out fuse_collectives, or inner.",
            )

    def refuse(self, sizes: Mapping[str, int]) -> None:
        """Raise ConfigError for an option that a mesh of these sizes does not obey."""
        values = {**vars(self), "precision": Precision.of(self.precision).matmul}
        refuse(values, axis_sizes(self.mesh), sizes)

    @property
    def order(self) -> tuple[str, int]:
        """The schedule of a pipeline, and the stages of each rank."""
        schedule = self.schedule or "1f1b"
        return schedule, (self.virtual_stages or 2) if schedule == "interleaved" else 1

    def lines(self) -> list[str]:
        """The options that must be the same on all ranks, one a line.

        The mesh and the plan are compared by what they come to.
        """
        own = ("mesh", "plan", "timeout")
        names = [field.name for field in dataclasses.fields(self) if field.name not in own]
        return [f"option {_name(name)}: {getattr(self, name)!r}" for name in names]

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Config:
        """The Config of an options dict; an unknown option is an error naming the closest one."""
        names = cls.names()
        given = dict(options or {})
        for name in given:
            if name not in names:
                refuse_removed([name])
                remedy = did_you_mean(
                    str(name),
                    [*names, *KEYS],
                    f"The options are {', '.join(names)}.",
                    cutoff=0.5,
                    spelled=lambda near: option(near) if near in KEYS else repr(near),
                )
                raise ConfigError(f"unknown autoshard option {name!r}", remedy=remedy)
        return cls(**fields_of(given))

    @classmethod
    def names(cls) -> list[str]:
        """The options: fields that stand alone, and each group once, in order."""
        fields = (field.name for field in dataclasses.fields(cls))
        return list(dict.fromkeys(KEYS.get(name, (name,))[0] for name in fields))

    @classmethod
    def table(cls) -> str:
        """The options as a Markdown table: name, default, allowed values, axes, meaning."""
        rows = ["| option | default | takes | acts on | meaning |", "|---|---|---|---|---|"]
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in cls.names():
            for own in GROUPS[name].values() if name in GROUPS else (name,):
                field = fields[own]
                values, doc, on = field.metadata["values"], field.metadata["doc"], ACTING[own]
                rows.append(
                    f"| `{_name(own)}` | `{field.default!r}` | {values} | {on.text()} | {doc} |"
                )
        return "\n".join(rows)


def _name(field: str) -> str:
    return ".".join(KEYS.get(field, (field,)))


def _show(value: Any) -> str:
    return str(axis_sizes(value)) if isinstance(value, DeviceMesh) else shown(value)
