"""What an operator and a collective cost on a described machine."""

from __future__ import annotations

from autoshard.planning.cost.bucket_size import default_bucket_bytes, reference_bytes
from autoshard.planning.cost.clusters import Cluster, Efficiency, cluster
from autoshard.planning.cost.machines import (
    DEFAULT_HARDWARE,
    HARDWARE,
    Hardware,
    Link,
    hardware,
    hardware_of,
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
    "collective_seconds",
    "default_bucket_bytes",
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
