"""From a model to what a server loads, from one process or from a running sharded job.

autoshard.export.trtllm(model, directory, tp=4, pp=2)      checkpoint of TensorRT-LLM <= 1.2
autoshard.export.huggingface(model, directory)             gathered Hugging Face directory
"""

from __future__ import annotations

from autoshard.export.errors import ExportError
from autoshard.export.hf_directory import huggingface
from autoshard.export.trtllm_checkpoint import trtllm, trtllm_build

__all__ = ["ExportError", "huggingface", "trtllm", "trtllm_build"]
