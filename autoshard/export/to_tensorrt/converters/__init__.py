"""ATen operators as TensorRT layers: each module of converters adds its own to CONVERTERS."""

from __future__ import annotations

from autoshard.export.to_tensorrt.converters import (  # imported to register
    pointwise,
    products,
    reductions,
    shapes,
)
from autoshard.export.to_tensorrt.converters.network import (
    CONVERTERS,
    DTYPES,
    QUANTIZED_DTYPES,
    Lowering,
)
