"""ATen operators as TensorRT layers."""

from __future__ import annotations

from autoshard.export.to_tensorrt.converters.network import CONVERTERS, Lowering

__all__ = [
    "CONVERTERS",
    "Lowering",
]
