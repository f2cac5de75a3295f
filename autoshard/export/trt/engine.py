"""`autoshard.export.tensorrt`: a model becomes a directory of engines, one a rank."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autoshard.export.destination import Destination
from autoshard.export.errors import ExportError, export_error
from autoshard.export.memory import Memory
from autoshard.export.rank_graph import InferencePlan, RankGraph, plan_inference
from autoshard.export.rank_weights import rank_weights
from autoshard.export.trt.build import Network, build, check_capabilities, make_network
from autoshard.export.trt.config import configuration, file_name, rank_entry
from autoshard.export.trt.convert import check_convertible
from autoshard.export.trt.interpreter import check_collectives
from autoshard.export.trt.spy import Spy

Progress = Callable[[str, int, int], None]
T = TypeVar("T")


def tensorrt(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    directory: str | Path,
    dtype: str | torch.dtype | None = "float16",
    dynamic: Mapping[str, tuple[int, int, int]] | None = None,
    max_length: int | None = None,
    compute_capability: str | Sequence[str] | None = None,
    hardware: str = "h100",
    builder: Any = None,
    progress: Progress | None = None,
) -> Path:
    """Write `config.json` and `rank{r}.engine` for each rank of `mesh`; return the directory.

    args, kwargs: an example batch; shapes and types count, values do not. mesh: {"tp": n}.
    dtype: "float16", "bfloat16" or "float32", of the weights; None: as they are.
    dynamic: (minimum, optimum, maximum) of "batch", dim 0 of every input, and of "sequence",
        dim 1; what is not named has the size of the example.
    max_length: tokens a key-value cache holds; None: whole sequences, without a cache.
    compute_capability: of the GPUs to build for, such as "8.9", or several; None: the builder's
        default. hardware: the machine to plan for (`planning.hardware.HARDWARE`).
    builder: the module `tensorrt` (11 or later) or `tensorrt_rtx`; None: the one installed.
    progress: called with (what, done, total).

    From one process: all ranks, one after the other. From a running sharded job: every process
    calls, all see one file system, and each builds the ranks r, r + world, ... from the weights it
    holds. The directory appears complete or not at all. Raises ExportError, before any file is
    written, for a mesh with another axis, an operator without a converter, a size the ranks do not
    divide, and a compute capability the builder has not, or has no collectives for.
    """
    tp = tp_of(mesh)
    trt = builder_module(builder)
    if isinstance(compute_capability, str):
        compute_capability = [compute_capability]
    capabilities = [str(one) for one in compute_capability or ()]
    memory = Memory(model)
    directory = Path(directory)
    rounds = -(-tp // memory.world)

    def prepare() -> tuple[InferencePlan, RankGraph, list[Any]]:
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
        levels = check_capabilities(trt, capabilities, graph)
        check_convertible(graph)
        return plan, graph, levels

    plan, graph, levels = together(memory, prepare)
    same_plan(memory, plan)
    entries: dict[int, dict[str, Any]] = {}
    weights = read_weights(memory, plan, graph)
    builds = memory.rank < tp  # a job may have more processes than engines have ranks
    network = together(memory, lambda: checked_network(trt, graph, weights)[0] if builds else None)
    destination = Destination(directory, memory.world, memory.rank)
    for turn in range(rounds):
        rank = turn * memory.world + memory.rank
        if turn > 0:
            network, weights = None, {}  # this memory goes before the next rank's comes
            graph = plan.rank_graph(min(rank, tp - 1))
            weights = read_weights(memory, plan, graph, turn)
        if rank < tp:
            file = destination.partial / file_name(rank)
            destination.attempt(
                functools.partial(_write, trt, network, graph, weights, levels, file, entries)
            )
            if progress is not None:
                progress(file_name(rank), rank + 1, tp)
    everybody = gathered(memory, entries)
    if memory.rank == 0:
        name = None if dtype is None else str(dtype_of(dtype)).removeprefix("torch.")
        config = configuration(trt, graph, capabilities, name)
        ranks = [everybody[r] for r in range(tp) if r in everybody]
        text = json.dumps({**config, "ranks": ranks}, indent=1) + "\n"
        destination.attempt(functools.partial(_save, destination.partial / "config.json", text))
    destination.finish()
    return directory


def _write(
    trt: Any,
    network: Network | None,
    graph: RankGraph,
    weights: Mapping[str, torch.Tensor],
    capabilities: Sequence[Any],
    file: Path,
    entries: dict[int, dict[str, Any]],
) -> None:
    if network is None:
        network, _ = checked_network(trt, graph, weights)
    engine = memoryview(build(network, capabilities))
    file.write_bytes(engine)
    entries[graph.rank] = rank_entry(graph, weights, hashlib.sha256(engine).hexdigest())


def _save(path: Path, text: str) -> None:
    path.write_text(text)


def checked_network(
    trt: Any, graph: RankGraph, weights: Mapping[str, torch.Tensor]
) -> tuple[Network, Spy]:
    """A rank's network, whose collectives are those of the graph."""
    spies: list[Spy] = []

    def spied(definition: Any) -> Spy:
        spies.append(Spy(definition))
        return spies[0]

    network = make_network(trt, graph, weights, spied)
    check_collectives(spies[0], graph)
    return network, spies[0]


def read_weights(
    memory: Memory, plan: InferencePlan, graph: RankGraph, turn: int = 0
) -> dict[str, torch.Tensor]:
    """The weights of the rank each process builds in a turn: turn * world + its own rank."""
    ranks = [turn * memory.world + process for process in range(memory.world)]
    axes = [graph.axis._replace(rank=rank) if rank < plan.tp else None for rank in ranks]
    return rank_weights(memory, [graph.weights if axis else None for axis in axes], axes)


def tp_of(mesh: Mapping[str, int]) -> int:
    """The number of ranks of an engine's mesh: only tp may be larger than 1."""
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


def builder_module(builder: Any = None) -> Any:
    """The module that builds: the one given, or `tensorrt` of 11 or later, or `tensorrt_rtx`."""
    if builder is not None and not isinstance(builder, str):
        return builder
    old = ""
    for name in ("tensorrt", "tensorrt_rtx") if builder is None else (builder,):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module.INetworkDefinition, "add_dist_collective"):
            return module
        old = f"; {name} {module.__version__} has no collectives"
    raise export_error(
        f"no {builder or 'TensorRT'} is installed that builds engines with collectives{old}",
        remedy="pip install 'autoshard[tensorrt-rtx]', or TensorRT 11 or later.",
    )


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

