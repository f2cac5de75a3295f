"""Small seeded models and batches: what the end-to-end tests shard and compare with serial.

Every model is tiny, fp32 and without dropout, so that a difference between the sharded and the
serial run is an error and not noise.
"""

from __future__ import annotations

from model_case import Case
from models_hf import HUGGING_FACE
from models_plain import HAND_WRITTEN

CASES: dict[str, Case] = {case.name: case for case in HUGGING_FACE + HAND_WRITTEN}

__all__ = ["CASES", "Case"]
