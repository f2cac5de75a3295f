"""A directory with a file a rank, from one process or from a running sharded job; any format."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autoshard.export.destination import Destination
from autoshard.export.errors import ExportError, export_error
from autoshard.export.rank_graph.config import configuration, rank_entry
from autoshard.export.rank_graph.graph import InferencePlan, RankGraph, plan_inference
from autoshard.export.rank_graph.weights import rank_weights
from autoshard.export.weights import Memory

Progress = Callable[[str, int, int], None]
T = TypeVar("T")


class Format(Protocol[T]):
    """What a rank graph becomes. name, version: of the format; suffix: of its files."""

    name: str
    version: int
    suffix: str

    def check(self, graph: RankGraph) -> None:
        """Raise ExportError for what the format cannot hold, before weights are read."""
        ...

    def make(self, graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> T:
        """A rank's file, in memory. Raises ExportError."""
        ...

    def write(self, made: T, file: Path) -> Mapping[str, Any]:
        """Write it; what the rank's entry of config.json says beside the file and the hashes."""
        ...

    def describe(self, graph: RankGraph) -> Mapping[str, Any]:
        """What config.json says of the format's maker."""
        ...


def write_ranks(
    form: Format[T],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    mesh: Mapping[str, int],
    directory: str | Path,
    dtype: str | torch.dtype | None,
    dynamic: Mapping[str, tuple[int, int, int]] | None,
    max_length: int | None,
    hardware: str,
    progress: Progress | None,
) -> Path:
    """Write `config.json` and `rank{r}{suffix}` for each rank of `mesh`; return the directory.

    For the arguments see `autoshard.export.tensorrt`. From one process: all ranks, one after the
    other. From a running sharded job: every process calls, all see one file system, and each writes
    the ranks r, r + world, ... from the weights it holds. The directory appears complete or not at
    all, and the first rank of every process is made before any file is written.
    """
    tp, memory, directory = tp_of(mesh), Memory(model), Path(directory)

    def prepare() -> tuple[InferencePlan, RankGraph]:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise export_error(f"{directory} exists", remedy="Give another directory.")
        plan = plan_inference(
            model,
            args,
            kwargs,
            tp=tp,
            dtype=dtype_of(dtype),
            dynamic=dynamic,
            max_length=max_length,
            hardware=hardware,
        )
        graph = plan.rank_graph(min(memory.rank, tp - 1))
        form.check(graph)
        return plan, graph

    plan, graph = together(memory, prepare)
    same_plan(memory, plan)
    entries: dict[int, dict[str, Any]] = {}
    weights = read_weights(memory, plan, graph)
    has_one = memory.rank < tp  # a job may have more processes than the mesh has ranks
    made = together(memory, lambda: form.make(graph, weights) if has_one else None)
    destination = Destination(directory, memory.world, memory.rank)

    def write(graph: RankGraph, weights: Mapping[str, torch.Tensor], made: T | None) -> None:
        file = destination.partial / f"rank{graph.rank}{form.suffix}"
        more = form.write(form.make(graph, weights) if made is None else made, file)
        entries[graph.rank] = {**rank_entry(graph, weights, file), **more}
        if progress is not None:
            progress(file.name, graph.rank + 1, tp)

    try:
        for turn in range(-(-tp // memory.world)):
            rank = turn * memory.world + memory.rank
            if turn > 0:
                made, weights = None, {}  # this memory goes before the next rank's comes
                graph = plan.rank_graph(min(rank, tp - 1))
                weights = read_weights(memory, plan, graph, turn)
            if rank < tp:
                destination.attempt(functools.partial(write, graph, weights, made))
        everybody = gathered(memory, entries)
        if memory.rank == 0:
            name = None if dtype is None else str(dtype_of(dtype)).removeprefix("torch.")
            config = {
                "format": form.name,
                "format_version": form.version,
                **form.describe(graph),
                **configuration(graph, name),
                "ranks": [everybody[rank] for rank in range(tp) if rank in everybody],
            }
            text = json.dumps(config, indent=1) + "\n"
            destination.attempt(functools.partial(_save, destination.partial / "config.json", text))
        destination.finish()
    except BaseException:
        destination.abandon()
        raise
    return directory


def _save(path: Path, text: str) -> None:
    path.write_text(text)


def read_weights(
    memory: Memory, plan: InferencePlan, graph: RankGraph, turn: int = 0
) -> dict[str, torch.Tensor]:
    """The weights of the rank each process builds in a turn: turn * world + its own rank."""
    ranks = [turn * memory.world + process for process in range(memory.world)]
    axes = [graph.axis._replace(rank=rank) if rank < plan.tp else None for rank in ranks]
    return rank_weights(memory, [graph.weights if axis else None for axis in axes], axes)


def tp_of(mesh: Mapping[str, int]) -> int:
    """The number of ranks of a mesh for inference: only tp may be larger than 1."""
    other = {name: size for name, size in mesh.items() if name != "tp" and size != 1}
    if other:
        name, size = next(iter(other.items()))
        raise export_error(
            f"mesh axis {name} of size {size}: an engine communicates in one process group, that "
            "of the axis tp",
            remedy="Give mesh={'tp': n}; replicas of a server each load the same engines.",
        )
    tp = mesh.get("tp", 1)
    if not isinstance(tp, int) or tp < 1:
        raise export_error(f"mesh axis tp has size {tp!r}")
    return tp


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """torch's type of a name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in ("float16", "bfloat16", "float32"):
        raise export_error(
            f"dtype {dtype!r} is not known", remedy="Give float16, bfloat16 or float32."
        )
    found: torch.dtype = getattr(torch, dtype)
    return found


def together(memory: Memory, action: Callable[[], T]) -> T:
    """Run `action` on every process; an error on one is an error on all."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    if memory.world > 1:
        said: list[Any] = [None] * memory.world
        dist.all_gather_object(said, None if error is None else f"{type(error).__name__}: {error}")
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if failed and error is None:
            raise ExportError(f"rank {failed[0][0]} failed: {failed[0][1]}")
    if error is not None:
        raise error
    return result


def same_plan(memory: Memory, plan: InferencePlan) -> None:
    """Engines of different plans would hang, or be wrong together."""
    states = {name: state for name, state in plan.program.stored().items()}
    text = json.dumps([states, sorted(plan.program.plan.graphs)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    if memory.world > 1:
        said: list[Any] = [None] * memory.world
        dist.all_gather_object(said, digest)
        if len(set(said)) > 1:
            raise ExportError(f"the processes made different plans: {said}")


def gathered(memory: Memory, mine: dict[int, Any]) -> dict[int, Any]:
    """Every process's entries."""
    if memory.world == 1:
        return mine
    said: list[Any] = [None] * memory.world
    dist.all_gather_object(said, mine)
    return {rank: entry for part in said for rank, entry in part.items()}
