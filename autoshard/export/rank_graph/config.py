"""The `config.json` of a directory with a file a rank: all that a runner must know beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.rank_graph.graph import Port, RankGraph


def rank_entry(graph: RankGraph, weights: Mapping[str, torch.Tensor], file: Path) -> dict[str, Any]:
    """What is particular to one rank: its file, the hash of it and of each of its weights."""
    hashes = {}
    for target, weight in sorted(graph.weights.items(), key=lambda item: item[1].name):
        if target not in weights:
            continue
        hashes[weight.name] = {
            "state": weight.state,
            "shape": list(weights[target].shape),
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
        "profiles": [
            {
                name: {"minimum": e.minimum, "optimum": e.optimum, "maximum": e.maximum}
                for name, e in profile.items()
            }
            for profile in graph.profiles
        ],
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
