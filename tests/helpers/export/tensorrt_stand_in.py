"""A TensorRT that loads only the bytes b"whole", into an engine that takes no shape."""

from __future__ import annotations

from typing import Any


class StandIn:
    """What the runner uses of the module `tensorrt`."""

    __version__ = "1"

    class Logger:
        WARNING = 0

        def __init__(self, level: int) -> None:
            pass

    class Runtime:
        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, data: bytes) -> Any:
            return self if data == b"whole" else None

        def create_execution_context(self) -> Any:
            return self

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            return False
