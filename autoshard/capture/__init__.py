"""Dynamo's graph becomes the functional ATen graph of the unsharded model."""

from __future__ import annotations

from autoshard.capture.guards import guard_divisible
from autoshard.capture.interception import (
    device_type,
    example_device,
    intercept,
    of_batch,
    of_marked_batch,
)
from autoshard.capture.interpreter import execution
from autoshard.capture.serial_graph import capture, global_fake
