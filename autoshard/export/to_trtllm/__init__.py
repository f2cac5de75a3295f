"""TensorRT-LLM checkpoints."""

from __future__ import annotations

from autoshard.export.to_trtllm.checkpoint import Progress, trtllm, trtllm_build
from autoshard.export.to_trtllm.pieces import Piece

__all__ = [
    "Piece",
    "Progress",
    "trtllm",
    "trtllm_build",
]
