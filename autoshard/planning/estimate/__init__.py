"""Time and memory of a training step on a mesh, from the plan alone."""

from __future__ import annotations

from autoshard.planning.estimate.mesh import (
    Footprint,
    Layout,
    Timing,
    footprint,
    timing,
)
from autoshard.planning.estimate.step_profile import REDUCED, STORED, Profile, profile
from autoshard.planning.estimate.training import Training

__all__ = [
    "Footprint",
    "Layout",
    "Profile",
    "REDUCED",
    "STORED",
    "Timing",
    "Training",
    "footprint",
    "profile",
    "timing",
]
