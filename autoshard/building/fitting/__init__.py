"""Programs within a memory budget, as counted: what is kept, and what is computed again."""

from __future__ import annotations

from autoshard.building.fitting.placements import (
    chunk_as_first,
    fit,
    refuse_eager,
    remembered_by,
)
from autoshard.building.fitting.trials import Bisection, counted_part
