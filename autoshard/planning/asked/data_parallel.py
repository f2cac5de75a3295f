"""The data-parallel axes of a request, as weights are priced on them."""

from __future__ import annotations

from autoshard.planning.asked.request import Request
from autoshard.planning.cost import Machine, default_bucket_bytes, reference_bytes
from autoshard.planning.estimate import DataAxes
from autoshard.planning.strategy import value
from autoshard.planning.values import global_bytes


def data_axes(n: int, machine: Machine, request: Request, second: float) -> DataAxes:
    """The axes beside the planned one of `n` ranks. second: as in `DataAxes`."""
    layout, parameters = request.layout, request.parameters
    ranks = {"dp_shard": layout.shard // layout.inner, "dp_replicate": layout.replicate}
    ranks |= {"ep": layout.experts, "cp": layout.outer, request.axis: n}
    items = [value(node).element_size() for node in parameters]
    limit = default_bucket_bytes(
        sum(map(global_bytes, parameters)) // n,
        max((reference_bytes(item, layout.shard) for item in items), default=0),
    )
    return DataAxes(
        n=n,
        layout=layout,
        ranks=ranks,
        links=machine.links,
        second=second,
        bucket=max(1, layout.bucket_bytes or limit),
    )
