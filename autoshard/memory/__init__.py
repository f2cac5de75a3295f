"""Bytes a rank holds in a step, from the graphs that run."""

from __future__ import annotations

from autoshard.memory.step import (
    BUFFERS,
    KINDS,
    OPTIMIZER,
    OPTIMIZERS,
    PARAMETERS,
    PENDING,
    Memory,
    Moment,
    Step,
    summary,
)

__all__ = [
    "BUFFERS",
    "KINDS",
    "Memory",
    "Moment",
    "OPTIMIZER",
    "OPTIMIZERS",
    "PARAMETERS",
    "PENDING",
    "Step",
    "summary",
]
