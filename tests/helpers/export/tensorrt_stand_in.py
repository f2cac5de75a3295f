"""A TensorRT that loads only the bytes b"whole", into an engine that takes no shape."""

from __future__ import annotations

from typing import Any, ClassVar


class StandIn:
    """What the runner uses of the module `tensorrt`."""

    __version__ = "1"
    profiles: ClassVar[list[int]] = []
    """The profiles that were chosen, in order."""

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

        def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
            StandIn.profiles.append(profile)
            return True

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            return False
