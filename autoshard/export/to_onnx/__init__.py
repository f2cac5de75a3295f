"""ONNX models with collectives inside, one a rank."""

from __future__ import annotations

from autoshard.export.to_onnx.directory import onnx
