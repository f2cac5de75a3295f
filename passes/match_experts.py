"""match_experts: a mixture of experts becomes one node, which shards as a whole.

    before                                          after
    %x: f32[6,8]                                    %x: f32[6,8]
    %ids: i64[6,2]                                  %ids: i64[6,2]
    %weights: f32[6,2]                              %weights: f32[6,2]
    %up: f32[4,16,8]                                %up: f32[4,16,8]
    %down: f32[4,8,16]                              %down: f32[4,8,16]
    %0: i64[12] = reshape(%ids, [-1])               %0: f32[6,8] = experts(%x, %ids, %weights,
    %1: (i64[12], i64[12]) = sort(%0)                   [%up, %down], body)
    ... rows by expert, grouped_mm, relu,
        grouped_mm, times weight, back in order
    %20: f32[6,2,8] = reshape(%19, [6,2,8])
    %21: f32[6,8] = sum(%20, [1])

Found from the structure alone: experts' numbers that are sorted, tokens picked in that order,
products of those rows and stacks of matrices between the ends of each expert's rows, weights of
the router, the order undone, and a sum over a token's rows. What lies between the products (the
body) is any program that keeps rows apart. The operator computes the same numbers, bit by bit.

Not done: loops over experts, and products of every expert with every token (`bmm`), which shard
operator by operator; what is near a mixture and is none is in the report and in
`meta[MIXTURES]`, for `explain`. On one rank of tp or cp nothing is gained, unless there is an axis
ep (`exchange_experts`).
"""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.passes.base import Context, Pass, Report, emit, user_line
from autoshard.passes.lib.expert_routes import (
    NotExperts,
    Route,
    find_route,
    is_inverse,
    is_token,
    product_name,
)
from autoshard.passes.lib.layouts import permutation
from autoshard.planning import arguments, reached
from autoshard.runtime.graph_meta import MIXTURES
from autoshard.runtime.operators import (
    ELEMENT,
    EXPERTS,
    OFFS,
    OWNER,
    ROWS,
    STACK,
    WEIGHT,
    Body,
    Instruction,
)

aten = torch.ops.aten

# Of rows [rows, columns] along the columns; others of one row at a time carry torch's tag.
_COLUMNS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.slice.Tensor)
_PLAIN = (aten._to_copy.default, aten.clone.default)
_TURNS = (aten.transpose.int, aten.mT.default, aten.permute.default)


class RowProgram:
    """The rows of one mixture, from the tokens that are picked to the sum over each token's rows.

    x: [tokens, hidden]. weights: [tokens, k], what the router gives. stacks: what all experts have,
    [experts, ...]. result: the sum. Raises NotExperts.
    """

    def __init__(self, route: Route) -> None:
        self.route = route
        self.x: Any = None
        self.weights: Any = None
        self.result: Any = None
        self.stacks: list[fx.Node] = []
        self.products: list[fx.Node] = []
        self.instructions: list[Instruction] = []
        self.names: dict[fx.Node, str] = dict.fromkeys(route.owners, OWNER) | {route.offs: OFFS}
        self.rows: set[fx.Node] = set()
        self.last: Any = None
        self._find()

    def body(self) -> Body:
        """What runs on the rows."""
        return Body(tuple(self.instructions))

    def _find(self) -> None:
        for node in _in_reach(self.route):
            if self._entry(node):
                continue
            read = [arg for arg in node.all_input_nodes if arg in self.rows]
            if not read and not self._looks_up(node):
                continue
            if node.target is aten.index.Tensor and read == [node.args[0]]:
                self._leave(node)
            elif node.op == "output":
                raise NotExperts("the graph returns a value of the rows")
            else:
                self._instruction(node)
        if self.result is None or self.x is None or self.weights is None or self.last is None:
            raise NotExperts("the rows are not put back in order and summed for each token")
        if not self.products:
            raise NotExperts("no grouped product reads the rows of the tokens")
        if self.names[self.last] != f"%{len(self.instructions) - 1}":
            raise NotExperts(f"{self.last.name} is not the last that is computed of the rows")

    # The ends

    def _entry(self, node: fx.Node) -> bool:
        """Whether the node picks, for each row, its token or its weight."""
        if node.target is not aten.index.Tensor:
            return False
        operands: Any = node.args
        source, places = operands
        if len(places) != 1:
            return False
        (place,) = places
        repeated = source.target is aten.repeat_interleave.self_int and source.args[1:] in (
            (self.route.k, 0),
            (self.route.k, -2),
        )
        if repeated and place is self.route.order:
            source = source.args[0]
        elif place is self.route.order and source.meta["val"].dim() == 1:
            flat = source.target is aten.reshape.default
            weights = source.args[0] if flat else source
            self._set("weights", weights, node, WEIGHT)
            shape = weights.meta["val"].shape
            if len(shape) != 2 or shape[1] != self.route.k:
                raise NotExperts(f"weights of the router are {list(shape)}, not [tokens, k]")
            return True
        elif not is_token(place, self.route):
            return False
        if source.meta["val"].dim() != 2:
            raise NotExperts(f"tokens have {source.meta['val'].dim()} dims, not [tokens, hidden]")
        self._set("x", source, node, ROWS)
        return True

    def _set(self, field: str, source: fx.Node, node: fx.Node, name: str) -> None:
        if getattr(self, field) not in (None, source):
            raise NotExperts(f"rows are picked of {getattr(self, field).name} and of {source.name}")
        setattr(self, field, source)
        self.names[node] = name
        self.rows.add(node)

    def _leave(self, node: Any) -> None:
        """From sorted rows back to tokens: index by the inverse order, reshape, sum."""
        places: Any = node.args[1]
        if len(places) != 1 or not is_inverse(places[0], self.route):
            raise NotExperts(f"{node.name} picks rows by something else than their first order")
        (view,) = _only(node)
        shape = view.meta["val"].shape
        if view.target is not aten.reshape.default or len(shape) != 3 or shape[1] != self.route.k:
            raise NotExperts("the rows of a token are not brought together as [tokens, k, hidden]")
        (total,) = _only(view)
        if total.target is not aten.sum.dim_IntList or list(total.args[1]) not in ([1], [-2]):
            raise NotExperts("the rows of a token are not summed")
        if any(total.args[2:]) or total.kwargs:
            raise NotExperts("the sum over a token's rows keeps its dim or has another dtype")
        if self.result is not None:
            raise NotExperts("the rows are summed twice")
        self.result, self.last = total, node.args[0]

    # Between them

    def _looks_up(self, node: Any) -> bool:
        """Whether the node picks, for each row, what its expert has (a bias)."""
        return node.target is aten.index.Tensor and list(node.args[1]) in (
            [owner] for owner in self.route.owners
        )

    def _instruction(self, node: fx.Node) -> None:
        args: list[Any] = list(node.args)
        if product_name(node):
            args[1] = self._stack(args[1])
            if args[2:] and args[2] is not self.route.offs:
                raise NotExperts("two products of the rows end at different places")
            if node.all_input_nodes[0] not in self.rows:
                raise NotExperts("a grouped product multiplies something else than the rows")
            self.products.append(node)
        elif self._looks_up(node):
            args[0] = self._stack(args[0])
        elif strange := [n for n in node.all_input_nodes if n not in self.rows]:
            raise NotExperts(f"{node.target} joins the rows and {strange[0].name}")
        elif not _by_row(node):
            raise NotExperts(f"{node.target} is not known to keep rows apart")
        self._add(node, args, dict(node.kwargs))
        self.rows.add(node)

    def _stack(self, node: Any) -> str:
        """The name of a stack, or of its matrices transposed."""
        if node in self.names:
            return self.names[node]
        if node.target in _TURNS:
            if not _keeps_experts(node):
                raise NotExperts(f"{node.name} turns a stack so that its experts are not first")
            source = self._stack(node.args[0])
            self._add(node, [source, *node.args[1:]], dict(node.kwargs))
            return self.names[node]
        if node.meta["val"].shape[0] != self.route.experts:
            raise NotExperts(f"{node.name} has not one part for each of the experts")
        self.names[node] = f"{STACK}{len(self.stacks)}"
        self.stacks.append(node)
        return self.names[node]

    def _add(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        def named(argument: Any) -> Any:
            if isinstance(argument, fx.Node) and argument in self.names:
                return self.names[argument]
            if isinstance(argument, (list, tuple)):
                return tuple(map(named, argument))
            if argument is None or isinstance(argument, (bool, int, float, str, torch.dtype)):
                return argument
            raise NotExperts(f"{node.name} has an argument {argument!r}")

        name = ELEMENT if node.target is operator.getitem else str(node.target)
        kept = {key: named(each) for key, each in kwargs.items() if key not in _UNSAID}
        self.names[node] = f"%{len(self.instructions)}"
        self.instructions.append(Instruction(name, named(args), tuple(kept.items())))


_UNSAID = ("memory_format", "pin_memory", "layout", "device", "non_blocking")


def _keeps_experts(turn: fx.Node) -> bool:
    """Whether a transposition leaves the first of the dims where it is."""
    if turn.target is aten.mT.default:
        return bool(turn.meta["val"].dim() == 3)
    order = permutation(turn)
    return order is not None and order[0] == 0


def _in_reach(route: Route) -> list[fx.Node]:
    """The nodes that depend on the order or the experts of the rows, in the order of the graph."""
    starts = [user for node in (route.order, *route.owners) for user in node.users]
    return sorted(reached(starts, lambda node: node.users))


def _only(node: fx.Node) -> list[Any]:
    if len(node.users) != 1:
        raise NotExperts(f"{len(node.users)} operators read {node.name}, not one")
    return list(node.users)


def _by_row(node: Any) -> bool:
    """Whether each row of the result is made of the same row of the operands."""
    target = node.target
    if target is operator.getitem or target in _PLAIN:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    first = node.all_input_nodes[0].meta["val"]
    rank = first.dim() if isinstance(first, torch.Tensor) else 0
    if target in _COLUMNS:
        return rank == 2 and arguments(node)["dim"] in (1, -1)
    if target is aten.unsqueeze.default:
        return rank == 1 and node.args[1] in (1, -1)
    if torch.Tag.pointwise not in target.tags:
        return False
    values = [n.meta["val"] for n in node.all_input_nodes]
    made = node.meta["val"]
    same = all(isinstance(v, torch.Tensor) and v.dim() == made.dim() for v in values)
    leaves = pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return same and not any(isinstance(leaf, torch.SymInt) for leaf in leaves)


class MixtureFound(NamedTuple):
    """A mixture of experts in a graph, or products of experts that are none as they are written.

    what: "4 experts, 2 a token"; "" where it is not matched, because of `reason`.
    """

    what: str
    reason: str
    where: str


@dataclass(frozen=True)
class MatchExperts(Pass, optional=True):
    """See the module's text. exchanges: whether there is an axis ep."""

    exchanges: bool = False

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        found = Counter[MixtureFound]()
        products = [node for node in gm.graph.nodes if product_name(node)]
        if (ctx.axis.size == 1 and not self.exchanges) or not products:
            return
        done: set[fx.Node] = set()
        for node in products:
            if node in done:
                continue
            try:
                route = find_route(node)
                done.update(self._replace(gm.graph, route))
            except NotExperts as reason:
                report.skip(node, str(reason))
                found[MixtureFound("", str(reason), user_line(node))] += 1
                continue
            what = f"{route.experts} experts, {route.k} a token"
            found[MixtureFound(what, "", user_line(node))] += 1
            report.hits += 1
        gm.graph.eliminate_dead_code()
        gm.meta[MIXTURES] = found

    def _replace(self, graph: fx.Graph, route: Route) -> list[fx.Node]:
        """The products of the mixture, which one node has replaced."""
        program = RowProgram(route)
        result, body = program.result, program.body().text()
        arguments: list[Any] = [program.x, route.ids, program.weights, program.stacks, body]
        with graph.inserting_before(result):
            node = emit(graph, result, EXPERTS, arguments, provenance=self.name, value=result)
        result.replace_all_uses_with(node)
        return program.products
