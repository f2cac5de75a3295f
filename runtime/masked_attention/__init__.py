"""Attention to the keys that a causal mask with a window, documents or padding lets through."""

from autoshard.runtime.masked_attention.operator import (
    MASKED_ATTENTION,
    masked_both_ends,
    masked_prefix,
)
from autoshard.runtime.masked_attention.varlen import WIDEST_HEAD
