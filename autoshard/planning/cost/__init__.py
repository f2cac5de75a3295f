"""The costs of operators and collectives on a described machine."""

from autoshard.planning.cost.clusters import DEFAULT_HARDWARE, Cluster, Machine, cluster, cluster_of
from autoshard.planning.cost.machines import Link
from autoshard.planning.cost.merged import (
    START_SECONDS,
    Fusing,
    aligned,
    default_bucket_bytes,
    fill_buckets,
    fused_dims,
    fusing_for,
    multiplies,
    product_flops,
)
from autoshard.planning.cost.model import (
    COLLECTIVES,
    ONE_SHOT_BYTES,
    WAIT_SECONDS,
    OperatorWork,
    change_collectives,
    change_seconds,
    collective_seconds,
    dtype_made,
    hint,
    is_attention,
    node_flops,
    numel,
    outer_dim,
    ring_bytes,
    tensor_bytes,
    work_of,
)
