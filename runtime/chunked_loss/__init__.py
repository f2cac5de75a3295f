"""Cross entropy of a product's rows, a part of the rows at a time: the logits are never whole."""

from __future__ import annotations

from autoshard.runtime.chunked_loss.loss import chunked_cross_entropy
from autoshard.runtime.chunked_loss.operator import CHUNKED_LOSS, reductions_of, scratch_of
from autoshard.runtime.chunked_loss.row_functions import RowFunction, as_text, copies_of, kept_by
from autoshard.runtime.chunked_loss.sizes import rows_a_chunk, scratch_bytes
