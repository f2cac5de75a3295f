"""How many rows a chunk has, and the memory that it takes."""

from __future__ import annotations

_FEWEST_ROWS = 256
"""Below this a matrix product is too small to be quick."""


def rows_a_chunk(rows: int, classes: int, width: int) -> int:
    """Rows of which the logits are about as large as the whole hidden states.

    The rule of Liger Kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2): as many chunks as
    classes over width, the rows of one rounded up to a power of two. classes: those of the rank
    that has most, so that all ranks have the same chunks.
    """
    chunks = max(1, -(-classes // width))
    size = 1 << (-(-rows // chunks) - 1).bit_length() if rows > chunks else 1
    return max(size, _FEWEST_ROWS)


PARTS = 8
"""In which a chunk's product is added to a wider sum: the product is never whole."""


def scratch_bytes(
    rows: int, own: int, classes: int, width: int, wide: int, narrow: int, copies: int
) -> int:
    """Bytes that the operator has inside at most: what it makes of a chunk's logits, and a part of
    the weight's gradient.

    own: the rank's classes. classes: those of the rank that has most. wide, narrow: bytes of an
    element of the scores as the loss is computed, and of the weight. copies: `copies_of` what is
    between.
    """
    size = min(rows, rows_a_chunk(rows, classes, width))
    part = 0 if narrow == wide else -(-own // PARTS) * width * narrow
    return size * own * (wide + narrow * copies) + part
