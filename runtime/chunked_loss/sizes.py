"""How many rows a chunk has."""

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
