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
    from autoshard.program import Program
    from autoshard.proof import Proof, verify
    from autoshard.rendering import render
    from autoshard.storing import shard
    from autoshard.tracing import trace

_HOME = {
    "AutoshardError": "autoshard.errors",
    "Config": "autoshard.config",
    "Plan": "autoshard.planning.plan",
    "Program": "autoshard.program",
    "Proof": "autoshard.proof",
    "programs": "autoshard.backend",
    "render": "autoshard.rendering",
    "shard": "autoshard.storing",
    "sharding_rule": "autoshard.planning.registry",
    "trace": "autoshard.tracing",
    "verify": "autoshard.proof",
}

__all__ = [
    "AutoshardError",
    "Config",
    "Plan",
    "Program",
    "Proof",
    "programs",
    "render",
    "shard",
    "sharding_rule",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "export":
        return importlib.import_module("autoshard.export")
    if name not in _HOME:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
