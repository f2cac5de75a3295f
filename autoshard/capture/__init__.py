"""Dynamo's graph becomes the functional ATen graph of the unsharded model."""

from __future__ import annotations

from autoshard.capture.interpreter import IDENTITY_TARGETS, execution
from autoshard.capture.serial_graph import GLOBAL_TYPES, capture

__all__ = [
    "GLOBAL_TYPES",
    "IDENTITY_TARGETS",
    "capture",
    "execution",
]
