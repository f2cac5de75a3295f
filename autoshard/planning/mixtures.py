"""A mixture of experts in a plan: which way it is split, and the rows inside of it, which no edge
of the graph shows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.sizes import count
from autoshard.planning.strategy import ImplCollective, Strategy, operands, value
from autoshard.runtime.collectives import P, S, chunk_size, shard_dim
from autoshard.runtime.operators import EXPERTS, STACK, Body, parse
from autoshard.runtime.operators import ROWS as READ_ROWS

_INDEX = 8  # bytes of an index
_INDICES = 3  # of each row: its choice, its token, its place

ROWS, WEIGHTS = "rows", "weights"
"""What may travel over ep for a mixture: rows to their experts, or the experts to the rows."""


def is_mixture(node: fx.Node) -> bool:
    """Whether the node is a mixture of experts as one operator."""
    return node.target is EXPERTS


def is_stack(node: fx.Node) -> bool:
    """Whether a node is a stack of experts that one mixture reads, and nothing else."""
    return len(node.users) == 1 and all(is_mixture(n) and node in n.args[3] for n in node.users)  # type: ignore[operator]


def exchangeable(node: fx.Node) -> int:
    """How many experts a mixture has whose stacks may stay where they are on an axis ep, while rows
    travel; 0 where that is not so, whatever the axis."""
    stacks: list[fx.Node] = node.args[3]  # type: ignore[assignment]
    stored = all(stack.op == "placeholder" and is_stack(stack) for stack in stacks)
    stored = stored and len(set(stacks)) == len(stacks)
    if not stored or not_of_zero(node.args[4]):  # type: ignore[arg-type]
        return 0
    return cost.hint(value(stacks[0]).shape[0])


def exchanged(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int, n: int
) -> list[ImplCollective]:
    """The collectives of rows that travel to their experts, if those are chosen evenly.

    x, ids, weights: of the tokens of one of n ranks. Gradients come back by as many.
    """
    rows, choices = count(ids.shape), count(ids.shape[-1:])
    nbytes = rows * count(x.shape[1:]) * x.element_size()
    row = ImplCollective("all_to_all", nbytes, copies=choices)
    weight = ImplCollective("all_to_all", rows * weights.element_size())
    counts = ImplCollective("all_to_all", chunk_size(experts, n) * n * ids.element_size())
    back = [each._replace(backward=True) for each in (row, weight, row)]
    return [counts, row, weight, row, *back]


def exchanged_beside(node: fx.Node, strategy: Strategy, n: int, ranks: int) -> list[ImplCollective]:
    """The collectives over an axis ep of `ranks` of a mixture that runs so on a planned axis of n;
    none where its rows do not travel there.

    The rows of a planned rank travel: those of its tokens, or of its experts; else all.
    """
    if strategy.on_ep != ROWS:
        return []
    x, ids, weights, stack, *_ = map(value, operands(node))
    parts = n if way_of(strategy) in (WAYS[0], WAYS[2], WAYS[3]) else 1
    return [
        one._replace(nbytes=one.nbytes // parts, axis="ep", n=ranks)
        for one in exchanged(x, ids, weights, cost.hint(stack.shape[0]), ranks)
    ]


# Of rows that are zero, because no expert here has them, these may make no number.
_NOT_OF_ZERO = ("div", "reciprocal", "log", "log2", "log10", "rsqrt", "sqrt", "pow", "xlogy")


def not_of_zero(text: str) -> str:
    """The operator of a body that may not be finite for rows of zeros; "" where there is none."""
    for one in parse(text).instructions:
        name = one.op.split(".")[1] if "." in one.op else one.op
        by_number = name in ("div", "pow") and len(one.reads()) == 1
        if name in _NOT_OF_ZERO and not (by_number and one.args[0] in one.reads()):
            return one.op
    return ""


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


def stacks_by(strategies: Mapping[fx.Node, Strategy], way: str) -> list[fx.Node]:
    """The stacks of the mixtures for which this travels over ep."""
    mixtures: list[Any] = [node for node, one in strategies.items() if one.on_ep == way]
    return [stack for node in mixtures for stack in node.args[3]]


def gathered_stacks(gm: fx.GraphModule, strategies: Mapping[fx.Node, Strategy]) -> frozenset[int]:
    """The positions of the placeholders of stacks that travel over ep by these strategies."""
    stacks, placeholders = stacks_by(strategies, WEIGHTS), gm.graph.find_nodes(op="placeholder")
    return frozenset(i for i, node in enumerate(placeholders) if node in stacks)


def row_bytes(node: fx.Node, strategy: Strategy, n: int) -> tuple[int, int]:
    """(bytes of the rows that a rank keeps of a mixture for the backward, of the widest of them).

    What grouped products read and what they make is kept, and the order of the rows. A rank that
    holds some of the experts has a row for every choice of every token all the same: the shapes
    must not depend on who chooses whom; unless they travel, over an axis ep besides.
    """
    x, ids, weights, *stacks = operands(node)
    body: Body = parse(node.args[4])  # type: ignore[arg-type]
    travel = strategy.on_ep == ROWS and way_of(strategy) == WAYS[0]
    fewer = travel or shard_dim(strategy.inputs[1]) is not None
    rows = cost.numel(value(ids)) // (n if fewer else 1)
    hidden = cost.hint(value(x).shape[-1])
    widths: list[int] = []
    for one in body.instructions:
        if one.is_product:
            stack = _stack(body, one.args[1])
            split = shard_dim(strategy.inputs[3 + stack])
            shape = [cost.hint(size) for size in value(stacks[stack]).shape]
            first, second = (size // (n if d == split else 1) for d, size in enumerate(shape) if d)
            again = any(w == hidden for w in widths) and one.args[0] == READ_ROWS
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
