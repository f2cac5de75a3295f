"""Weights in 8 or 4 bits: of Hugging Face directories, in layouts that servers read, and of
engines."""

from __future__ import annotations

from autoshard.export.quantization.accuracy import FILE, Inputs, example
from autoshard.export.quantization.choice import quantized_parameters
from autoshard.export.quantization.layouts import LAYOUTS
from autoshard.export.quantization.quantizer import Quantizer, measured
from autoshard.export.quantization.scaled_blocks import BlockScaled, block_scaled
