"""Weights in 8 or 4 bits: of Hugging Face directories, in layouts that servers read, and of
engines."""

from autoshard.export.quantization.layouts import LAYOUTS, BlockScaled, block_scaled
from autoshard.export.quantization.quantizer import (
    FILE,
    Inputs,
    QuantizedModel,
    Quantizer,
    example,
    measured,
    quantized_parameters,
)
