"""TensorRT engines with collectives inside, one a rank."""

from __future__ import annotations

from autoshard.export.to_tensorrt.check import cpu_engine, generate, networks
from autoshard.export.to_tensorrt.engine import builder_module, tensorrt
