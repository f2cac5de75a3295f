"""run_cheaper_rows: each mixture in the form that is cheaper over the calls an engine is made for.

Every expert on every token reads each matrix once; chosen rows are fewer, but their matrices are
looked up, which reads and writes them, before they are read. So the one is cheaper for some tens or
hundreds of tokens, the other for the few of a decode step and for long prompts.

So a rank's experts run on the rows that chose them, in shapes that nobody's choice changes:

    before (E experts of this rank, T tokens of k choices)     after
    %1: f32[1,T,H] = unsqueeze(%x, 0)                          %1: f32[N,B,H] = %x by expert
    %2: f32[E,T,I] = matmul(%1, %up)                           %2: f32[N,B,I] = matmul(%1, %up[of])
    ... relu, matmul, times what it counts, sum over E         ... relu, matmul, back to T x k, sum

The rows of each expert lie behind each other and are filled up to blocks of B, each of one expert,
whose matrices are looked up. However the tokens choose, no more than N blocks are begun:

    B = ceil(T k / E), at least 1      N = floor((T k + (B - 1) E) / B)

so N B rows are computed, less than 2 T k + E, where every expert on every token is E T: exact, with
no row dropped. While T k <= E a block is one row, and an expert that nobody chose is not read.
Choices of other ranks' experts have a place behind the last block, and count zero.

Not done: what computes experts in another way than traced_model.py, or with a collective inside.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.core_operators import POINTWISE
from autoshard.export.rank_graph.graph import call_like
from autoshard.export.rank_graph.tidy import propagate
from autoshard.export.spec import EngineSpec
from autoshard.passes import Context, Pass, Report, permutation, replace
from autoshard.planning.cost import Cluster, OperatorWork, cluster
from autoshard.runtime import compat

aten = torch.ops.aten


@dataclass(frozen=True)
class Mixture:
    """The nodes of one mixture.

    result: [tokens, hidden], its sum over the experts. picked: bool[experts, tokens, k], of which
    expert of this rank each choice is. counted: like it, what each choice counts. out: what the
    experts say, [experts, tokens, hidden]. inside: the operators that make it, in order. x: the
    tokens.
    """

    result: fx.Node
    picked: fx.Node
    counted: fx.Node
    out: fx.Node
    inside: tuple[fx.Node, ...]
    x: fx.Node

    @property
    def experts(self) -> int:
        return int(self.picked.meta["val"].shape[0])

    @property
    def chosen(self) -> int:
        """The experts that a token chooses, of all ranks'."""
        return int(self.picked.meta["val"].shape[2])

    @property
    def matrices(self) -> list[Any]:
        """Of each product of rows and experts' matrices, the sizes of one of these."""
        products: list[Any] = [n for n in self.inside if n.target is aten.matmul.default]
        return [node.args[1].meta["val"].shape[1:] for node in products]

    @property
    def parameters(self) -> int:
        """Numbers in the matrices of one expert."""
        return sum(math.prod(sizes) for sizes in self.matrices)

    @property
    def widths(self) -> int:
        """Numbers that a row of one token is read and written as around the products."""
        return sum(sum(sizes) for sizes in self.matrices)


def mixtures(graph: fx.Graph) -> Iterator[Mixture]:
    """Those whose experts' rows are computed without a collective in between."""
    for node in list(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        found = _read(node)
        if found is not None:
            yield found


def _read(result: fx.Node) -> Mixture | None:
    product: Any = result.args[0]
    if list(result.args[1]) != [0] or len(result.args) > 2 or result.kwargs:  # type: ignore[arg-type]
        return None
    if product.target is not aten.mul.Tensor:
        return None
    said, share = product.args
    if not _calls(said, aten.where.self) or not _calls(share, aten.sum.dim_IntList):
        return None
    chose, out, _ = said.args
    counted = share.args[0]
    if not _calls(chose, aten.any.dim) or not _calls(counted, aten.where.self):
        return None
    picked = counted.args[0]
    if chose.args[0] is not picked or not _calls(picked, aten.eq.Tensor):
        return None
    shape = picked.meta["val"].shape
    if len(shape) != 3 or out.meta["val"].dim() != 3:
        return None
    inside: dict[fx.Node, None] = {}
    x = _follow(out, shape[0], inside)
    users = {user for node in inside for user in node.users}
    if x is None or users - inside.keys() - {said}:
        return None
    return Mixture(result, picked, counted, out, tuple(sorted(inside)), x)


def _follow(out: fx.Node, experts: int, inside: dict[fx.Node, None]) -> fx.Node | None:
    """The tokens that the experts' rows are made of; None where they are made in another way."""
    x: fx.Node | None = None
    waiting = [out]
    while waiting:
        node = waiting.pop()
        if node in inside:
            continue
        inside[node] = None
        args: Any = node.args
        if node.target is aten.matmul.default:
            rows, stack = args
            if not is_of_experts(stack, experts):
                return None
            if not _calls(rows, aten.unsqueeze.default) or rows.args[1] != 0:
                waiting.append(rows)
            elif x in (None, rows.args[0]):
                x = rows.args[0]
            else:
                return None
        elif node.target in POINTWISE:
            waiting += [
                operand
                for operand in node.all_input_nodes
                if getattr(operand.meta["val"], "shape", ()) != ()
                and not is_of_experts(operand, experts)
            ]
        elif node.target is aten.slice.Tensor and args[1] in (2, -1):
            waiting.append(args[0])
        else:
            return None
    return x


def is_of_experts(node: Any, experts: int) -> bool:
    """Whether it is made of one weight alone, whose first dim is that of the experts."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    at = node
    while at.op != "placeholder":
        column = at.target is aten.unsqueeze.default and at.args[1] in (1, -2)  # of vectors
        if not column and not keeps_experts(at):
            return False
        at = at.args[0]  # type: ignore[assignment]
    shape = at.meta["val"].shape
    return len(shape) > 1 and shape[0] == experts and all(isinstance(size, int) for size in shape)


def keeps_experts(node: fx.Node) -> bool:
    """Whether an operator leaves the first dim of a stack of matrices where it is."""
    order = permutation(node)
    return node.target is aten._to_copy.default if order is None else order[0] == 0


def _calls(node: Any, target: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def blocks_of(tokens: int, chosen: int, experts: int) -> tuple[int, int]:
    """(the most blocks, rows of a block) of so many tokens."""
    rows = tokens * chosen
    block = max(1, -(-rows // experts))
    return (rows + (block - 1) * experts) // block, block


class _Writer:
    def __init__(self, mixture: Mixture) -> None:
        self.of, self.call = mixture, functools.partial(call_like, mixture.result)
        self.made: dict[fx.Node, fx.Node] = {}
        self.stacks: dict[fx.Node, fx.Node] = {}

    # Sizes: numbers, or nodes where the number of tokens is not known

    def size(self, operation: Callable[..., Any], left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            return operation(left, right)
        return self.call(operation, left, right)

    def number(self, size: Any) -> fx.Node:
        """A size as a tensor [1]."""
        zero = self.call(aten.full.default, [1], 0, dtype=torch.int64)
        return self.call(aten.add.Tensor, zero, size)

    def write(self) -> fx.Node:
        """The nodes, before the result; the one that replaces it."""
        of = self.of
        experts, k = of.experts, of.chosen
        tokens: Any = of.picked.meta["val"].shape[1]
        if not isinstance(tokens, int):
            tokens = self.call(aten.sym_size.int, of.picked, 1)
        rows = self.size(operator.mul, tokens, k)
        up = self.size(operator.add, rows, experts - 1)
        block = self.size(torch.sym_max, self.size(operator.floordiv, up, experts), 1)
        spare = self.size(operator.mul, self.size(operator.sub, block, 1), experts)
        blocks = self.size(operator.floordiv, self.size(operator.add, rows, spare), block)
        places = self.size(operator.mul, blocks, block)

        hot = self.call(aten.permute.default, of.picked, [1, 2, 0])
        hot = self.call(aten.reshape.default, hot, [rows, experts])
        hot = self.call(aten._to_copy.default, hot, dtype=torch.int64)
        counts = self.call(aten.sum.dim_IntList, hot, [0])
        begun = self.call(aten.add.Tensor, counts, self.size(operator.sub, block, 1))
        begun = self.call(aten.div.Tensor_mode, begun, block, rounding_mode="floor")
        ends = self.call(aten.cumsum.default, begun, 0)
        starts = self.call(aten.mul.Tensor, self.call(aten.sub.Tensor, ends, begun), block)
        # of each choice, its number among those of its expert, then its place
        number = self.call(aten.sub.Tensor, self.call(aten.cumsum.default, hot, 0), 1)
        place = self.call(aten.add.Tensor, number, starts)
        place = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, place, hot), [1])
        mine = self.call(aten.sum.dim_IntList, hot, [1])
        mine = self.call(aten.gt.Scalar, mine, 0)
        place = self.call(aten.where.self, mine, place, self.number(places))

        empty = self.call(
            aten.full.default, [self.size(operator.add, places, 1)], 0, dtype=torch.int64
        )
        choices = self.call(aten.arange.start_step, 0, rows, 1, dtype=torch.int64)
        choice = self.call(aten.scatter.src, empty, 0, place, choices)
        choice = self.call(aten.slice.Tensor, choice, 0, 0, places)
        token = self.call(aten.div.Tensor_mode, choice, k, rounding_mode="floor")
        hidden = of.x.meta["val"].shape[-1]
        chosen = self.call(aten.index_select.default, of.x, 0, token)
        chosen = self.call(aten.reshape.default, chosen, [blocks, block, hidden])

        numbers = self.call(aten.arange.start_step, 0, blocks, 1, dtype=torch.int64)
        numbers = self.call(aten.unsqueeze.default, numbers, 1)
        owner = self.call(aten.ge.Tensor, numbers, self.call(aten.unsqueeze.default, ends, 0))
        owner = self.call(aten._to_copy.default, owner, dtype=torch.int64)
        owner = self.call(aten.sum.dim_IntList, owner, [1])
        owner = self.call(aten.clamp.default, owner, 0, experts - 1)  # of blocks that none began

        out = self.inside(chosen, owner)
        width = of.out.meta["val"].shape[-1]
        flat = self.call(aten.reshape.default, out, [places, width])
        last = self.size(operator.sub, places, 1)
        inner = self.call(aten.minimum.default, place, self.number(last))
        said = self.call(aten.index_select.default, flat, 0, inner)
        dtype = of.out.meta["val"].dtype
        zero = self.call(aten.full.default, [], 0, dtype=dtype)
        mine = self.call(aten.unsqueeze.default, mine, 1)
        said = self.call(aten.where.self, mine, said, zero)
        counted = self.call(aten.sum.dim_IntList, of.counted, [0])
        counted = self.call(aten.reshape.default, counted, [rows, 1])
        said = self.call(aten.mul.Tensor, said, counted)
        said = self.call(aten.reshape.default, said, [tokens, k, width])
        return self.call(aten.sum.dim_IntList, said, [1])

    def inside(self, chosen: fx.Node, owner: fx.Node) -> fx.Node:
        """What the experts say of blocks of rows."""
        for node in self.of.inside:
            args: list[Any] = []
            for operand in node.args:
                if not isinstance(operand, fx.Node):
                    args.append(operand)
                elif operand in self.made:
                    args.append(self.made[operand])
                elif is_of_experts(operand, self.of.experts):
                    args.append(self.stack(operand, owner))
                elif node.target is aten.matmul.default and operand is node.args[0]:
                    args.append(chosen)
                else:
                    args.append(operand)  # a number
            self.made[node] = self.call(node.target, *args, **node.kwargs)
        return self.made[self.of.out]

    def stack(self, node: fx.Node, owner: fx.Node) -> fx.Node:
        """The matrices of each block's expert, looked up where the weight is stored."""
        if node not in self.stacks:
            if node.op == "placeholder" or not keeps_experts(node):
                made = self.call(aten.index_select.default, node, 0, owner)
            else:
                source: Any = node.args[0]
                made = self.call(
                    node.target, self.stack(source, owner), *node.args[1:], **node.kwargs
                )
            self.stacks[node] = made
        return self.stacks[node]


# Layers that find the places of the rows, beside those that both forms have: a kernel each at most.
_PLACING_SECONDS = 5e-5


@dataclass(frozen=True)
class RunCheaperRows(Pass, optional=True):
    """See the module's text. sizes: the name of each symbol."""

    sizes: Mapping[str, str]
    spec: EngineSpec

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        machine = cluster(self.spec.hardware).sheet
        for mixture in mixtures(gm.graph):
            calls = calls_of(mixture, self.sizes, self.spec)
            chosen, every = (
                sum(n * seconds(mixture, tokens, form, machine) for tokens, n in calls)
                for form in (True, False)
            )
            if chosen < every:
                with gm.graph.inserting_before(mixture.result):
                    replace(mixture.result, _Writer(mixture).write())
                report.hits += 1
            else:
                said = f"chosen rows take {chosen:.3g} s, every expert on every token {every:.3g} s"
                report.skip(mixture.result, said)
        propagate(gm.graph)


def calls_of(mixture: Mixture, sizes: Mapping[str, str], spec: EngineSpec) -> list[tuple[int, int]]:
    """(tokens, how many calls of so many): one of the sizes that are optimised for; with a cache
    also one of the fewest tokens for each further token that the cache has room for."""
    extents = spec.extents
    first = {name: extent.optimum for name, extent in extents.items()}
    calls = [(first, 1)]
    if spec.max_length is not None and "sequence" in extents:
        step = {**first, "sequence": extents["sequence"].minimum}
        calls.append((step, max(1, spec.max_length - first["sequence"])))
    size = mixture.picked.meta["val"].shape[1]
    if isinstance(size, int):
        return [(size, sum(n for _, n in calls))]
    expression = compat.size_expression(size)
    return [
        (int(expression.subs({s: at[sizes[str(s)]] for s in expression.free_symbols})), n)
        for at, n in calls
    ]


def seconds(mixture: Mixture, tokens: int, chosen: bool, machine: Cluster) -> float:
    """Roofline seconds of a call: products, matrices that are read (one that is looked up is read,
    written and read again), rows that are read and written."""
    val, count, matrices = mixture.out.meta["val"], mixture.experts * tokens, mixture.experts
    if chosen:
        blocks, block = blocks_of(tokens, mixture.chosen, mixture.experts)
        count, matrices = blocks * block, 3 * blocks
    nbytes = (matrices * mixture.parameters + count * mixture.widths) * val.element_size()
    spent = machine.seconds(OperatorWork(2.0 * count * mixture.parameters, nbytes, val.dtype))
    return spent + (_PLACING_SECONDS if chosen else 0.0)
