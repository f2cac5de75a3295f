"""Which losses of a planned graph go by chunks of rows: decided for all ranks, from what that
spares a rank, and what it adds: bytes, from sizes alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.chunked_loss.head import Head, LeftWhole, arguments_of, head_of, is_loss
from autoshard.planning.cost import tensor_bytes
from autoshard.planning.strategy import Strategy, operands, parts_of, value
from autoshard.planning.values import state_of
from autoshard.runtime.collectives import chunk_size, forward_value, shard_dim
from autoshard.runtime.graph_meta import DIFF, WITHOUT_GRADIENTS
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


_LARGE = 1 << 30


class Chunking(NamedTuple):
    """What is asked of losses. least: bytes that a rank must gain; None: whatever that is.
    withhold: whether logits that the model returns with gradients may be withheld. unneeded: why
    those that could are whole all the same."""

    least: int | None
    withhold: bool = False
    unneeded: str = ""


ALWAYS = Chunking(None, True)
LARGE = Chunking(_LARGE)
"""Where no budget of memory is known: less is seldom a noticeable part of a step's peak."""
FITS = Chunking(_LARGE, unneeded="a step fits its memory with whole logits")
NEEDED = Chunking(1)
"""Where a step does not fit the budget otherwise: any gain counts."""


def chunking_of(option: bool | str, budgeted: bool) -> tuple[Chunking | None, Chunking | None]:
    """What the option `chunk_loss` asks: at first, and where a step does not fit its budget.

    With "auto" and a budget, logits stay whole as long as that fits: chunks cost time where a
    compiler makes whole logits' loss in fewer passes over memory.
    """
    if option == "auto":
        return (FITS, NEEDED) if budgeted else (LARGE, LARGE)
    return (ALWAYS, ALWAYS) if option else (None, None)


@dataclass(frozen=True)
class LossPlan:
    """A loss by chunks, or why it is whole. nbytes: of a rank's logits."""

    nbytes: int
    reason: str = ""
    head: Head | None = None
    balance: Balance | None = None

    @property
    def chunked(self) -> bool:
        """Whether it goes by chunks."""
        return not self.reason


Losses = dict[fx.Node, LossPlan]


class Chunks(NamedTuple):
    """The operators of losses that go by chunks: those inside, with what they make never whole, and
    the balance of each loss."""

    inside: dict[fx.Node, Head]
    gradients: dict[fx.Node, Balance]


def chunks_of(losses: Losses) -> Chunks:
    """The operators of those among `losses` that go by chunks."""
    found = Chunks({}, {})
    for loss, one in losses.items():
        if one.head is not None and one.balance is not None:
            found.inside.update(dict.fromkeys(one.head.chain, one.head))
            found.gradients[loss] = one.balance
    return found


def plan_losses(
    gm: fx.GraphModule, strategies: Mapping[fx.Node, Strategy], n: int, how: Chunking | None
) -> Losses:
    """The losses of a graph that go by chunks, and the large ones that do not, with why.

    strategies: on an axis of `n` ranks. how: None: all are whole, and nothing is told.
    """
    found: Losses = {}
    for node in gm.graph.nodes:
        if how is None or node.op != "call_function" or not is_loss(node):
            continue
        try:
            one = _planned(gm, node, strategies, n, how)
        except LeftWhole as left:
            scores, want = operands(node)[0], strategies[node].inputs[0]
            one = LossPlan(tensor_bytes(value(scores)) // parts_of(want, n), str(left))
        if one.chunked or how.least is None or one.nbytes >= _LARGE:
            found[node] = one
    return found


def _planned(
    gm: fx.GraphModule, loss: fx.Node, strategies: Mapping[fx.Node, Strategy], n: int, how: Chunking
) -> LossPlan:
    arguments_of(loss)
    head = head_of(loss)
    for reader, source in zip((loss, *head.chain), head.chain):
        at = operands(reader).index(source)
        want = strategies[reader].inputs[at]
        if forward_value(want) != forward_value(state_of(source, strategies)):
            raise LeftWhole("the plan sends its logits, or splits them anew")
    trains = bool(loss.meta.get(DIFF)) and not gm.meta.get(WITHOUT_GRADIENTS)
    for reader in head.readers(loss):
        if reader.op != "output":
            raise LeftWhole(f"{reader.name} reads its logits too")
        if not trains:
            raise LeftWhole("the model returns its logits, and no gradient is asked for")
        if not how.withhold:
            raise LeftWhole(
                "the model returns its logits, which chunk_loss=True withholds in training"
            )
    product, scores = head.chain[-1], value(head.chain[0])
    dim, last = shard_dim(state_of(product, strategies)), value(product).dim() - 1
    classes = scores.shape[1]
    rows = cost.numel(scores) // cost.hint(classes)
    split = n if dim == last else 1
    if dim is not None and dim != last:
        rows = chunk_size(rows, n)
    balance = head_balance(head, rows, split, trains)
    if how.least is not None and balance.gain < how.least:
        gain = f"{balance.gain:,} bytes" if balance.gain > 0 else "nothing"
        raise LeftWhole(f"by chunks it would spare {gain}, less than {how.least:,}")
    if how.unneeded:
        raise LeftWhole(how.unneeded)
    return LossPlan(balance.logits, "", head, balance)
