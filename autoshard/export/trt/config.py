"""The `config.json` of an engine directory: all that a runner must know beside the engines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.export.rank_graph import Port, RankGraph

FORMAT, VERSION = "autoshard-engine", 1


def rank_entry(
    graph: RankGraph, weights: Mapping[str, torch.Tensor], engine: str
) -> dict[str, Any]:
    """What is particular to one rank: its file and the hash of each of its weights.

    engine: SHA-256 of the engine's bytes.
    """
    hashes = {
        graph.weights[target].name: {
            "state": graph.weights[target].state,
            "shape": list(tensor.shape),
            "sha256": digest(tensor),
        }
        for target, tensor in sorted(weights.items(), key=lambda item: graph.weights[item[0]].name)
    }
    return {"file": file_name(graph.rank), "sha256": engine, "weights": hashes}


def file_name(rank: int) -> str:
    """The file of a rank's engine."""
    return f"rank{rank}.engine"


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def configuration(
    trt: Any, graph: RankGraph, capabilities: Sequence[str], dtype: str | None
) -> dict[str, Any]:
    """All of config.json but "ranks", which holds a `rank_entry` for each."""
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
        "format": FORMAT,
        "format_version": VERSION,
        "builder": {
            "module": trt.__name__,
            "version": trt.__version__,
            "compute_capabilities": list(capabilities),
        },
        "mesh": {graph.axis.name: graph.tp},
        "dtype": dtype,
        "inputs": [_port(port) for port in graph.inputs],
        "outputs": [_port(port) for port in graph.outputs],
        "profiles": [
            {
                name: {"minimum": e.minimum, "optimum": e.optimum, "maximum": e.maximum}
                for name, e in graph.symbols.items()
            }
        ],
        "kv_cache": cache,
    }


def _port(port: Port) -> dict[str, Any]:
    return {
        "name": port.tensor,
        "dtype": str(port.dtype).removeprefix("torch."),
        "shape": list(port.shape),
        "role": port.role,
    }
