"""The profiles of stages: of all stages of a rank, and the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from autoshard.planning.estimate import (
    Footprint,
    Layout,
    Profile,
    SavedForBackward,
    Training,
    footprint,
)


def joined(parts: Sequence[Profile]) -> Profile:
    """The profile of all stages of a rank, one after the other."""
    if len(parts) == 1:
        return parts[0]
    starts = list(accumulate((len(part.forward) for part in parts), initial=0))
    numbered = list(zip(starts, parts))
    return replace(
        parts[0],
        forward=tuple(each for part in parts for each in part.forward),
        backward=tuple(each for part in parts for each in part.backward),
        sent=tuple(s._replace(at=s.at + start) for start, part in numbered for s in part.sent),
        weights=tuple(
            replace(weight, use=weight.use + start)
            for start, part in numbered
            for weight in part.weights
            if weight.use is not None
        ),
        activations=SavedForBackward(
            saved=sum(part.activations.saved for part in parts),
            transient=max(part.activations.transient for part in parts),
        ),
    )


def stage_footprint(part: Profile, layout: Layout, training: Training) -> Footprint:
    """The memory of a stage: gradients stay whole until the last micro-batch."""
    own = footprint(part, layout, training)
    ep = layout.experts  # over which gradients of experts that stay are added up at once
    sizes = ((w, w.numel // (ep if w.stays(ep) else 1)) for w in part.weights if w.trained)
    whole = sum(size * training.gradient(w.kept) for w, size in sizes)
    return replace(own, gradients=whole)
