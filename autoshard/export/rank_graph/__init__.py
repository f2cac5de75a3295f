"""The inference graph of one rank, its weights and the directory they are written to."""

from __future__ import annotations

from autoshard.export.rank_graph.config import configuration, file_digest
from autoshard.export.rank_graph.files import (
    Progress,
    dtype_of,
    read_weights,
    same_plan,
    tp_of,
    write_ranks,
)
from autoshard.export.rank_graph.graph import Port, RankGraph, plan_inference
from autoshard.export.rank_graph.operators import NONE, attention, update_cache

__all__ = [
    "NONE",
    "Port",
    "Progress",
    "RankGraph",
    "attention",
    "configuration",
    "dtype_of",
    "file_digest",
    "plan_inference",
    "read_weights",
    "same_plan",
    "tp_of",
    "update_cache",
    "write_ranks",
]
