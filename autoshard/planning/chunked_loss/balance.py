"""What a loss by chunks of rows spares a rank, and what it adds: bytes, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.planning import cost
from autoshard.planning.chunked_loss.head import Head
from autoshard.planning.strategy import value
from autoshard.runtime.collectives import chunk_size
from autoshard.runtime.graph_meta import DIFF
from autoshard.runtime.operators import copies_of, kept_by, scratch_bytes


@dataclass(frozen=True)
class Balance:
    """Bytes of the rank that has most.

    logits: of whole logits. spared: of those and of their gradient, as the compiler that keeps
    least of them has them. kept: gradients of hidden states, weight and bias, from forward to
    backward. scratch: inside of the operator. scaled: what backward makes of `kept`, beside it.
    """

    logits: int
    spared: int
    kept: int
    scratch: int
    scaled: int

    @property
    def added(self) -> int:
        """Bytes at the worst moment: the end of forward, or the start of backward."""
        return self.kept + max(self.scratch, self.scaled)

    @property
    def gain(self) -> int:
        """Bytes that a step needs less, where its peak is at the loss; negative: more."""
        return self.spared - self.added


def head_balance(head: Head, rows: int, ranks: int, trains: bool) -> Balance:
    """The balance of a loss of so many rows on a rank, of the classes of which a rank has one of
    `ranks` parts. trains: whether gradients are made."""
    hidden, weight, bias = head.operands
    product, scores = value(head.chain[-1]), value(head.chain[0])
    classes = chunk_size(cost.hint(product.shape[-1]), ranks)
    width = cost.hint(value(hidden).shape[-1])
    cells, narrow = rows * classes, product.dtype.itemsize
    wide = torch.promote_types(scores.dtype, torch.float32).itemsize
    copies = copies_of(head.functions)
    scratch = scratch_bytes(rows, classes, classes, width, wide, narrow, copies)
    if not trains:
        upcast = scores.dtype.itemsize if scores.dtype != product.dtype else 0
        return Balance(cells * narrow, cells * (narrow + upcast), 0, scratch, 0)
    # torch's loss over whole classes keeps logarithms of probabilities, that over parts the scores
    each = scores.dtype.itemsize if ranks == 1 else narrow
    each += narrow * (1 + kept_by(head.functions))
    weight_size = classes * width if weight.meta.get(DIFF) else 0
    bias_size = classes if bias is not None and bias.meta.get(DIFF) else 0
    of_hidden = rows * width * narrow if hidden.meta.get(DIFF) else 0
    sums = (weight_size + bias_size) * max(4, narrow)
    return Balance(cells * narrow, cells * each, of_hidden + sums, scratch, of_hidden + sums)
