"""A directory with a file a rank, from one process or from a running sharded job, in any format;
its `config.json` says all that a runner must know beside them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from autoshard.export.destination import Destination, Progress
from autoshard.export.errors import on_every_rank
from autoshard.export.quantization import FILE as ACCURACY
from autoshard.export.quantization import measured
from autoshard.export.rank_graph.cache import Runner, check_cached
from autoshard.export.rank_graph.graph import Port, RankGraph
from autoshard.export.rank_graph.plan import InferencePlan, plan_inference
from autoshard.export.rank_graph.weights import read_weights
from autoshard.export.serial_graph import WeightSource, unwrapped
from autoshard.export.spec import EngineSpec
from autoshard.runtime.agreement import gather


def rank_entry(graph: RankGraph, weights: Mapping[str, torch.Tensor], file: Path) -> dict[str, Any]:
    """What is particular to one rank: its file, the hash of it and of each of its weights."""
    hashes = {}
    for target, weight in sorted(graph.weights.items(), key=lambda item: item[1].name):
        if target not in weights:
            continue
        hashes[weight.name] = {
            "state": weight.state,
            "shape": list(weights[target].shape),
            "dtype": _name(weights[target].dtype),
            "sha256": digest(weights[target]),
        }
        if weight.quantized is not None:
            hashes[weight.name] |= {
                "quantized": weight.quantized.kind,
                "scale_sha256": digest(weights[weight.quantized.scale]),
            }
    return {"file": file.name, "sha256": file_digest(file), "weights": hashes}


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def stop_tokens(model: nn.Module) -> list[int]:
    """The tokens that end a text, by the generation config of the model or by its config."""
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return [found] if isinstance(found, int) else [*found]
    return []


def configuration(graph: RankGraph, dtype: torch.dtype | None) -> dict[str, Any]:
    """What config.json says of every format: mesh, inputs and outputs, sizes, cache."""
    keys = [port for port in graph.inputs if port.role == "key_cache"]
    cache = None
    if keys:
        cache = {
            "layers": len(keys),
            "max_length": graph.max_length,
            "layout": ["batch", "heads_per_rank", "max_length", "head_dim"],
            "heads_per_rank": [port.shape[1] for port in keys],
        }
    return {
        "mesh": {graph.axis.name: graph.tp},
        "dtype": None if dtype is None else _name(dtype),
        "inputs": [_port(port) for port in graph.inputs],
        "outputs": [_port(port) for port in graph.outputs],
        "profiles": [{n: asdict(e) for n, e in profile.items()} for profile in graph.profiles],
        "kv_cache": cache,
    }


def _port(port: Port) -> dict[str, Any]:
    return {
        "name": port.tensor,
        "dtype": _name(port.dtype),
        "shape": list(port.shape),
        "role": port.role,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


T = TypeVar("T")

_ENCODER = ".encoder"


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

    def runner(self, made: T, graph: RankGraph) -> Runner | None:
        """What runs `made` on the CPU, alone; None: nothing but the graph's own operators."""
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
    directory: str | Path,
    spec: EngineSpec,
    progress: Progress | None = None,
) -> Path:
    """Write `config.json` and `rank{r}{suffix}` for each rank of `spec`; return the directory.

    From one process: all ranks, one after the other. From a running sharded job: every process
    calls, all see one file system, and each writes the ranks r, r + world, ... from the weights it
    holds. The directory appears complete or not at all, and the first rank of every process is
    made before any file is written. With a cache, what is made of each rank is compared on the CPU
    with the whole graph, token by token. Of an encoder-decoder with a cache there is also
    `rank{r}.encoder{suffix}`.
    """
    source, directory = WeightSource(model), Path(directory)
    with Destination(directory, source.job) as destination:
        _write(form, model, destination, source, spec, progress)
    return directory


def _write(
    form: Format[T],
    model: nn.Module,
    destination: Destination,
    source: WeightSource,
    spec: EngineSpec,
    progress: Progress | None,
) -> None:
    job, tell = source.job, progress or (lambda *said: None)

    def say(what: str, done: int) -> None:
        tell(what, done, spec.tp)

    def prepare() -> tuple[InferencePlan, RankGraph]:
        say("planning", 0)
        plan = plan_inference(model, spec)
        say("graph of the first rank", 0)
        graph = plan.rank_graph(min(job.rank, spec.tp - 1))
        form.check(graph)
        if graph.encoder is not None:
            form.check(graph.encoder)
        return plan, graph

    plan, graph = on_every_rank(prepare, "plan", job)
    plan.check_same(job)
    weights = read_weights(source, graph)

    def make(graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> T:
        say(f"making rank {graph.rank}", graph.rank)
        made = form.make(graph, weights)
        if graph.whole is not None:
            say(f"comparing rank {graph.rank} token by token", graph.rank)
        check_cached(graph, weights, form.runner(made, graph))
        return made

    # a job may have more processes than the mesh has ranks
    first = partial(make, graph, weights) if job.rank < spec.tp else lambda: None
    made = on_every_rank(first, "first file", job)
    entries: list[tuple[int, str, Mapping[str, Any]]] = []

    def write(
        graph: RankGraph, weights: Mapping[str, torch.Tensor], made: T | None, part: str = ""
    ) -> None:
        file = destination.partial / f"rank{graph.rank}{part}{form.suffix}"
        made = make(graph, weights) if made is None else made
        say(f"writing {file.name}", graph.rank)
        more = form.write(made, file)
        entries.append((graph.rank, part, {**rank_entry(graph, weights, file), **more}))
        say(file.name, graph.rank + (part == ""))

    for turn in range(0, spec.tp, job.size):
        rank = turn + job.rank
        if turn > 0:
            made, weights = None, {}  # this memory goes before the next rank's comes
            graph = plan.rank_graph(min(rank, spec.tp - 1))
            weights = read_weights(source, graph, turn)
        if graph.encoder is not None:
            encoding = read_weights(source, graph.encoder, turn)
            if rank < spec.tp:
                destination.attempt(partial(write, graph.encoder, encoding, None, _ENCODER))
            del encoding
        if rank < spec.tp:
            destination.attempt(partial(write, graph, weights, made))
    accuracy = None
    if spec.quantize is not None:
        say("measuring what is quantized", spec.tp)
        accuracy = measured(model, source, spec.weight_dtype, spec.quantize)
    everybody = [entry for part in gather(entries, "entries", job) for entry in part]
    everybody.sort(key=lambda entry: (entry[0], entry[1]))  # other ranks' are lists
    if job.rank == 0:
        config = {
            "format": form.name,
            "format_version": form.version,
            **form.describe(graph),
            **configuration(graph, spec.weight_dtype),
            "quantize": spec.quantize,
            "stop": stop_tokens(unwrapped(model)),
            "ranks": [entry for _, part, entry in everybody if part == ""],
        }
        if graph.encoder is not None:
            ports = configuration(graph.encoder, spec.weight_dtype)
            config["encoder"] = {
                **{name: ports[name] for name in ("inputs", "outputs", "profiles")},
                "ranks": [entry for _, part, entry in everybody if part == _ENCODER],
            }
        text = json.dumps(config, indent=1) + "\n"
        destination.attempt(partial((destination.partial / "config.json").write_text, text))
        if accuracy is not None:
            text = json.dumps(accuracy, indent=2, sort_keys=True) + "\n"
            destination.attempt(partial((destination.partial / ACCURACY).write_text, text))
