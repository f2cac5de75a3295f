"""autoshard: one line shards a PyTorch model over the processes torchrun started.

    model = torch.compile(model, backend="autoshard", options={"mesh": {"tp": 2}})

Names are loaded at first use: importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.compiling import render as render
    from autoshard.config import Config as Config
    from autoshard.errors import AutoshardError as AutoshardError
    from autoshard.mesh_search import plan as plan
    from autoshard.parameters import load_safetensors as load_safetensors
    from autoshard.parameters import save_safetensors as save_safetensors
    from autoshard.parameters import shard as shard
    from autoshard.planning import Plan as Plan
    from autoshard.planning.rules import sharding_rule as sharding_rule
    from autoshard.precision import Precision as Precision
    from autoshard.program import Program as Program
    from autoshard.program_registry import programs as programs
    from autoshard.runtime.parameters import discard_pending as discard_pending
    from autoshard.runtime.parameters import no_sync as no_sync
    from autoshard.tracing import trace as trace
    from autoshard.verification import Proof as Proof
    from autoshard.verification import verify as verify

#: Public name -> where it is defined.
_HOME = {
    "AutoshardError": "autoshard.errors",
    "Config": "autoshard.config",
    "Plan": "autoshard.planning",
    "Precision": "autoshard.precision",
    "Program": "autoshard.program",
    "Proof": "autoshard.verification",
    "discard_pending": "autoshard.runtime.parameters",
    "load_safetensors": "autoshard.parameters",
    "no_sync": "autoshard.runtime.parameters",
    "plan": "autoshard.mesh_search",
    "programs": "autoshard.program_registry",
    "render": "autoshard.compiling",
    "save_safetensors": "autoshard.parameters",
    "shard": "autoshard.parameters",
    "sharding_rule": "autoshard.planning.rules",
    "trace": "autoshard.tracing",
    "verify": "autoshard.verification",
}

__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in ("export", "rng"):
        return importlib.import_module(f"autoshard.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
