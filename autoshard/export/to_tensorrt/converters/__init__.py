"""ATen operators as TensorRT layers: each module of converters adds its own to CONVERTERS."""

from autoshard.export.to_tensorrt.converters import (  # imported to register
    arithmetic,
    products,
    shapes,
)
from autoshard.export.to_tensorrt.converters.network import (
    COLLECTIVES,
    CONVERTERS,
    DTYPES,
    QUANTIZED_DTYPES,
    Lowering,
)
