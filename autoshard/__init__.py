"""autoshard: one line shards a PyTorch model over the processes torchrun started.

    model = torch.compile(model, backend="autoshard", options={"mesh": {"tp": 2}})

Names are loaded at first use: importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.backend import programs
    from autoshard.config import Config
    from autoshard.errors import AutoshardError
    from autoshard.planning.plan import Plan
    from autoshard.planning.registry import sharding_rule
    from autoshard.precision import Precision
    from autoshard.program import Program
    from autoshard.proof import Proof, verify
    from autoshard.rendering import render
    from autoshard.runtime.accumulation import discard_pending, no_sync
    from autoshard.search import plan
    from autoshard.storing import shard
    from autoshard.tracing import trace
    from autoshard.weights import load_safetensors, save_safetensors

_HOME = {
    "AutoshardError": "autoshard.errors",
    "Config": "autoshard.config",
    "Plan": "autoshard.planning.plan",
    "Precision": "autoshard.precision",
    "Program": "autoshard.program",
    "Proof": "autoshard.proof",
    "load_safetensors": "autoshard.weights",
    "discard_pending": "autoshard.runtime.accumulation",
    "no_sync": "autoshard.runtime.accumulation",
    "plan": "autoshard.search",
    "programs": "autoshard.backend",
    "render": "autoshard.rendering",
    "save_safetensors": "autoshard.weights",
    "shard": "autoshard.storing",
    "sharding_rule": "autoshard.planning.registry",
    "trace": "autoshard.tracing",
    "verify": "autoshard.proof",
}

__all__ = [
    "AutoshardError",
    "Config",
    "Plan",
    "Precision",
    "Program",
    "Proof",
    "load_safetensors",
    "discard_pending",
    "no_sync",
    "plan",
    "programs",
    "render",
    "save_safetensors",
    "shard",
    "sharding_rule",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("export", "rng"):
        return importlib.import_module(f"autoshard.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
