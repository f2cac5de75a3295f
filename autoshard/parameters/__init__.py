"""Give parameters the storage a plan chose; fill and save them."""

from __future__ import annotations

from autoshard.parameters.safetensors import load_safetensors
from autoshard.parameters.storage import shard, store

__all__ = [
    "load_safetensors",
    "shard",
    "store",
]
