"""Weights of a Hugging Face directory in 8 or 4 bits, in layouts that servers read."""

from __future__ import annotations

from autoshard.export.quantization.accuracy import FILE, Inputs, example
from autoshard.export.quantization.layouts import LAYOUTS
from autoshard.export.quantization.quantizer import Quantizer
