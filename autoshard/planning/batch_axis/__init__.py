"""What dp_shard does with each weight, chosen in the plan of the axis beside it."""

from __future__ import annotations

from autoshard.planning.batch_axis.search import least_charged, within_room
from autoshard.planning.batch_axis.weights import batch_axis
