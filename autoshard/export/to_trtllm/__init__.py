"""Checkpoints that `trtllm-build` of TensorRT-LLM 1.2 and earlier reads."""

from autoshard.export.to_trtllm.checkpoint import trtllm, trtllm_build
