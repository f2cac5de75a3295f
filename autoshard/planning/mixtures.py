"""A mixture of experts in a plan: which way it is split, and the rows inside of it, which no edge
of the graph shows."""

from __future__ import annotations

from torch import fx

from autoshard.planning import cost
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.runtime.collectives import P, S, shard_dim
from autoshard.runtime.operators import EXPERTS, ROWS, STACK, Body, parse

_INDEX = 8  # bytes of an index
_INDICES = 3  # of each row: its choice, its token, its place


def is_mixture(node: fx.Node) -> bool:
    """Whether the node is a mixture of experts as one operator."""
    return node.target is EXPERTS


WAYS = (
    "experts split",
    "each expert split inside",
    "tokens split, weights gathered",
    "tokens and experts split",
)


def way_of(strategy: Strategy) -> str:
    """The one of `WAYS` that a strategy of a mixture is; "" where every rank runs all of it."""
    x, _, _, *stacks = strategy.inputs
    if shard_dim(x) is not None:
        return WAYS[2] if shard_dim(stacks[0]) is None else WAYS[3]
    if all(state == S(0) for state in stacks):
        return WAYS[0]
    return WAYS[1] if strategy.output == P else ""


def row_bytes(node: fx.Node, strategy: Strategy, n: int) -> tuple[int, int]:
    """(bytes of the rows that a rank keeps of a mixture for the backward, of the widest of them).

    What grouped products read and what they make is kept, and the order of the rows. A rank that
    holds some of the experts has a row for every choice of every token all the same: the shapes
    must not depend on who chooses whom.
    """
    x, ids, weights, *stacks = operands(node)
    body: Body = parse(node.args[4])  # type: ignore[arg-type]
    rows = cost.numel(value(ids)) // (n if shard_dim(strategy.inputs[1]) is not None else 1)
    hidden = cost.hint(value(x).shape[-1])
    widths: list[int] = []
    for one in body.instructions:
        if one.is_product:
            stack = _stack(body, one.args[1])
            split = shard_dim(strategy.inputs[3 + stack])
            shape = [cost.hint(size) for size in value(stacks[stack]).shape]
            first, second = (size // (n if d == split else 1) for d, size in enumerate(shape) if d)
            again = any(w == hidden for w in widths) and one.args[0] == ROWS
            widths += [first, second]
            if again:  # gate and up read the same rows
                widths.remove(hidden)
    size = value(x).element_size()
    kept = rows * (sum(widths) * size + value(weights).element_size() + _INDICES * _INDEX)
    return kept, rows * max(widths, default=0) * size


def inner_bytes(node: fx.Node, strategy: Strategy, n: int) -> int:
    """Bytes of `row_bytes`; 0 of any other operator, whose bytes are those of its edges."""
    return row_bytes(node, strategy, n)[0] if is_mixture(node) else 0


def _stack(body: Body, name: object) -> int:
    """Which stack a product reads, transposed or not."""
    assert isinstance(name, str)
    while not name.startswith(STACK):
        source: object = body.instructions[int(name[1:])].args[0]
        assert isinstance(source, str)
        name = source
    return int(name[len(STACK) :])
