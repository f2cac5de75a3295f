"""A TensorRT network computed by torch, to check it without a GPU."""

from __future__ import annotations

from autoshard.export.to_tensorrt.interpreter.network import (
    LoneInterpreter,
    NetworkInterpreter,
    check_collectives,
)
