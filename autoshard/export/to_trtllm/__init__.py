"""Checkpoints that `trtllm-build` of TensorRT-LLM 1.2 and earlier reads."""

from __future__ import annotations

from autoshard.export.to_trtllm.checkpoint import trtllm, trtllm_build
