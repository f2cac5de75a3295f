"""TensorRT engines with collectives inside, one a rank."""

from autoshard.export.to_tensorrt.engine import (
    builder_module,
    cpu_engine,
    generate,
    networks,
    tensorrt,
)
