"""Dynamo's graph becomes the functional ATen graph of the unsharded model."""

from __future__ import annotations

from autoshard.capture.five_layers import (
    equal_layers,
    layouts_of,
    own_inputs,
    short_form,
    unmark,
)
from autoshard.capture.growth import EqualLayers, Growth
from autoshard.capture.guards import guard_divisible
from autoshard.capture.interception import (
    device_type,
    example_device,
    intercept,
    of_batch,
    of_marked_batch,
)
from autoshard.capture.serial_graph import capture, global_fake
from autoshard.capture.subgraphs import execution
from autoshard.capture.tandem import (
    described,
    label,
    symbols,
    tandem_repeats,
    tensors_of,
    writes,
)
