"""Time and memory of a training step on a mesh, from the plan alone."""

from autoshard.planning.estimate.frontiers import Frontier, Point, frontier
from autoshard.planning.estimate.memory import Footprint, SavedForBackward, Saving, footprint, held
from autoshard.planning.estimate.mesh import (
    HostUpdate,
    OwnedUpdate,
    Timing,
    host_update,
    owned_update,
    timing,
    update_seconds,
    waits_of,
)
from autoshard.planning.estimate.recomputable import RankValue, Walk
from autoshard.planning.estimate.recomputation import Cuts, segments_of
from autoshard.planning.estimate.step_profile import Profile, profile, with_recomputation
from autoshard.planning.estimate.traffic import (
    DataAxes,
    Sent,
    Traffic,
    data_collectives,
    seconds,
    sent_by_axis,
)
from autoshard.planning.estimate.weights import Layout, Training, Weight, buckets, experts_of
