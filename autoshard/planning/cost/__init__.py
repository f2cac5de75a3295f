"""What an operator and a collective cost on a described machine."""

from __future__ import annotations

from autoshard.planning.cost.bucket_size import default_bucket_bytes, fill_buckets, reference_bytes
from autoshard.planning.cost.clusters import Cluster, Efficiency, cluster
from autoshard.planning.cost.machines import (
    DEFAULT_HARDWARE,
    HARDWARE,
    Hardware,
    Link,
    hardware,
)
from autoshard.planning.cost.model import (
    change_collectives,
    change_seconds,
    collective_seconds,
    hint,
    node_bytes,
    node_flops,
    node_seconds,
    numel,
    outer_dim,
    ring_bytes,
)
from autoshard.planning.cost.this_machine import cluster_of, hardware_of

__all__ = [
    "Cluster",
    "DEFAULT_HARDWARE",
    "Efficiency",
    "HARDWARE",
    "Hardware",
    "Link",
    "change_collectives",
    "change_seconds",
    "cluster",
    "cluster_of",
    "collective_seconds",
    "default_bucket_bytes",
    "fill_buckets",
    "hardware",
    "hardware_of",
    "hint",
    "node_bytes",
    "node_flops",
    "node_seconds",
    "numel",
    "outer_dim",
    "reference_bytes",
    "ring_bytes",
]
