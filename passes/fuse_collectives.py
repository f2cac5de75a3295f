"""fuse_collectives: a collective of an activation and the products beside it become one operator.

    before (tp=2)                                   after
    %0: f32[8,16] = all_gather(%x[4,16], tp)        %0 = all_gather_matmul(%x, [%v, %w], dim=0)
    %1 = wait(%0)                                   %3: f32[8,6] = %0[0]
    %3: f32[8,6] = mm(%1, %v)                       %4: f32[8,6] = %0[1]
    %4: f32[8,6] = mm(%1, %w)                       ...
    ...                                             %8: f32[4,16] = matmul_reduce_scatter(%6, %u, 0)
    %7: f32[8,16] = mm(%6, %u)
    %8 = wait(reduce_scatter(%7, sum, tp))

Both operators are in runtime/collectives/fused.py. All products that read one gathered
value share its gather (q, k and v; gate and up); what else reads it, the product of a weight's
gradient in backward, reads the whole that the operator returns too. A sum of products that is
scattered, the gradient of what q, k and v read, is one product of their factors side by side. The
dim along which ranks split is followed through views (layouts.py), in whatever spelling they are.

Works on forward and backward alike, after autograd: where a gather is fused with the products of a
layer, the reduce-scatter that is its derivative is, too.

Not done: all-reduces, which are reduce-scatters and gathers with sequence parallelism; a gather
along the dim that a product sums over; a gather that only the product of a weight's gradient reads;
float8 products.
"""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, replace
from autoshard.passes.lib.bucketing import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Member,
    aten,
    erase_unread,
    last_collectives,
    made_from,
    member,
)
from autoshard.passes.lib.layouts import (
    Arrangement,
    above,
    below,
    gathered_layout,
    in_order,
    is_rearranged,
    split_dim,
)
from autoshard.planning import cost, packet, tensor_bytes
from autoshard.planning.cost import START_SECONDS, Cluster, Fusing, work_of
from autoshard.runtime.collectives import GATHER_MATMUL, MATMUL_SCATTER, Axis, I, P
from autoshard.runtime.graph_meta import CHANGE

_DYNAMIC = "a size of it is known at run time only"
_PADDED = "its rows are padded, since the ranks do not divide them"


class _Term(NamedTuple):
    """A product in a sum: [rows, k] times [k, columns], and a bias that is added to the ranks' sum.

    dim: the one that ranks split the rows along; None: of a bias alone.
    """

    rows: fx.Node | None
    weight: fx.Node | None
    dim: int | None
    bias: fx.Node | None = None


@dataclass(frozen=True)
class FuseCollectives(Pass, optional=True):
    """fusing: when it is worth it, on the machine `cluster`, by the planned axis of `mesh` sizes.

    backward: whether the graph is the backward, where reductions of gradients of weights wait for
    nobody, and stay as they are.
    """

    fusing: Fusing
    cluster: Cluster
    link: cost.Link
    backward: bool = False

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite in place the gathers and reduce-scatters of the planned axis."""
        last = last_collectives(gm.graph, ctx.axis.group) if self.backward else set()
        for node in list(gm.graph.nodes):
            if node.target not in (ALL_GATHER, REDUCE_SCATTER) or node in last:
                continue
            if node.args[-1] != ctx.axis.group:
                continue
            one = member(node)
            fuse = self._gather if node.target is ALL_GATHER else self._scatter
            reason = _DYNAMIC if one is None else fuse(gm.graph, one, ctx.axis)
            if reason:
                report.skip(node, reason)
            else:
                report.hits += 1

    def _gather(self, graph: fx.Graph, one: Member, axis: Axis) -> str:
        """Fuse a gather with the products that read it; why not, where it cannot be."""
        shard = tuple(one.source.meta["val"].shape)
        views = _views(one.wait, gathered_layout(shard, axis.size))
        readers = [user for view in views for user in view.users if user not in views]
        if not readers:
            return "nothing reads it"
        first = min(readers)
        products: dict[fx.Node, int] = {}
        for view, layout in views.items():
            dim = split_dim(layout, shard)
            for user in view.users:
                if dim is not None and _is_product(user, view):
                    if not (made_from(_weight(user), first) & {*readers}):
                        products[user] = dim
        if not products:
            if any(one.target is aten.slice.Tensor for one in readers):
                return _PADDED
            names = ", ".join(dict.fromkeys(_name(reader) for reader in readers))
            return f"no product has its rows for a factor ({names})"
        dims = set(products.values())
        if len(dims) > 1:
            return "products read it as other matrices"
        (dim,) = dims
        read = {**dict.fromkeys(products), **views}
        others = [view for view in views if any(user not in read for user in view.users)]
        whole = [_ordered_above(view, views, shard, dim) for view in others]
        if None in whole:
            return "it is read in the order of ranks, too"
        if reason := self._loses(one, list(products), axis):
            return reason
        weights = [_weight(product) for product in products]
        for node in sorted({node for weight in weights for node in made_from(weight, first)}):
            first.prepend(node)
        make = maker(one.node, self.name)
        with graph.inserting_before(first):
            place = self._place(axis)
            fused = make(GATHER_MATMUL, one.source, weights, dim, bool(others), *place)
            count = len(weights) + bool(others)
            parts = [make(operator.getitem, fused, i) for i in range(count)]
        self._read_whole(graph, one, parts, others, views, (shard, dim), first)
        for product, part in zip(products, parts[bool(others) :], strict=True):
            with graph.inserting_before(product):
                new = self._like(part, product)
                if product.target is aten.addmm.default:
                    new = maker(product, self.name)(aten.add.Tensor, new, product.args[0])
            replace(product, new)
        erase_unread([*views, one.node])
        return ""

    def _read_whole(
        self,
        graph: fx.Graph,
        one: Member,
        parts: list[fx.Node],
        others: list[fx.Node],
        views: dict[fx.Node, Arrangement],
        split: tuple[tuple[int, ...], int],
        first: fx.Node,
    ) -> None:
        """Let what is no product read the gathered value that the operator returns."""
        needed: set[fx.Node] = set()
        for view in others:
            while view not in needed:
                needed.add(view)
                if in_order(views[view], *split):
                    break
                view = view.all_input_nodes[0]
        made: dict[fx.Node, fx.Node] = {}
        for view in views:
            if view not in needed:
                continue
            if in_order(views[view], *split):
                with graph.inserting_before(first):
                    made[view] = self._like(parts[0], view)
            else:
                first.prepend(view)  # it may stand before what it reads now
        for view in views:
            if view in made:
                for user in list(view.users):
                    if user not in views or (user in needed and user not in made):
                        user.replace_input_with(view, made[view])

    def _scatter(self, graph: fx.Graph, one: Member, axis: Axis) -> str:
        """Fuse a reduce-scatter with the product that it scatters; why not, where it cannot be."""
        shard = tuple(one.wait.meta["val"].shape)
        terms = _terms(one.source, gathered_layout(shard, axis.size), shard, axis.size)
        if isinstance(terms, str):
            return terms
        products = [term for term in terms if term.dim is not None]
        dims = {term.dim for term in products}
        if len(dims) != 1 or len({(p.rows, p.weight) for p in products}) != len(products):
            return "what is summed are products of other matrices"
        (dim,) = dims
        assert dim is not None
        factors: list[tuple[Any, Any]] = [(term.rows, term.weight) for term in products]
        beside = [node for pair in factors for node in pair] if len(factors) > 1 else []
        copied = 2 * sum(tensor_bytes(node.meta["val"]) for node in beside)
        made = [user for rows, weight in factors for user in rows.users if weight in user.args]
        if reason := self._loses(one, made, axis, copied):
            return reason
        rows = [size * axis.size if i == dim else size for i, size in enumerate(shard[:-1])]
        make = maker(one.node, self.name)
        with graph.inserting_before(one.node):
            x, weight = factors[0]
            if len(factors) > 1:
                x = make(aten.cat.default, [pair[0] for pair in factors], 1)
                weight = make(aten.cat.default, [pair[1] for pair in factors], 0)
            if len(rows) > 1:
                x = make(aten.reshape.default, x, [*rows, x.meta["val"].shape[1]])
            new = make(MATMUL_SCATTER, x, weight, dim, *self._place(axis))
            for term in terms:
                if term.bias is not None:
                    new = make(aten.add.Tensor, new, term.bias)
        one.wait.replace_all_uses_with(new)
        erase_unread([one.wait, one.node])
        return ""

    def _like(self, part: fx.Node, old: fx.Node) -> fx.Node:
        """`part` in the shape of what it takes the place of."""
        shape = old.meta["val"].shape
        if part.meta["val"].shape == shape:
            return part
        return maker(old, self.name)(aten.reshape.default, part, list(shape))

    def _place(self, axis: Axis) -> tuple[bool, int, int, str]:
        return not self.fusing.always, axis.size, axis.rank, axis.group

    def _loses(self, one: Member, products: list[fx.Node], axis: Axis, copied: int = 0) -> str:
        """Why it is not worth it; "" where it is."""
        op = "all_gather" if one.node.target is ALL_GATHER else "reduce_scatter"
        moved = cost.collective_seconds(op, one.nbytes, axis.size, self.link)
        computed = sum(self.cluster.seconds(work_of(product)) for product in products)
        copies = copied / self.link.copy_bandwidth
        if self.fusing.always or self.fusing.gain(moved, computed, copies) > 0:
            return ""
        return (
            f"{1e6 * moved:.0f} us of it beside {1e6 * computed:.0f} us of products spare less "
            f"than the {1e6 * (START_SECONDS + copies):.0f} us that it takes to run them together"
        )


def _views(wait: fx.Node, layout: Arrangement) -> dict[fx.Node, Arrangement]:
    """A gathered value and its views, with their layouts, in the order of the graph."""
    found, pending = {wait: layout}, [wait]
    while pending:
        node = pending.pop()
        for user in node.users:
            if is_rearranged(user) and (known := below(user, found[node])) is not None:
                found[user] = known
                pending.append(user)
    return {node: found[node] for node in sorted(found)}


def _is_product(user: fx.Node, view: fx.Node) -> bool:
    if user.target is aten.mm.default:
        return user.args[0] is view and user.args[1] is not view
    if user.target is aten.addmm.default and not user.kwargs:
        return user.args[1] is view and view not in (user.args[0], user.args[2])
    return False


def _weight(product: fx.Node) -> Any:
    return product.args[-1]


def _name(node: fx.Node) -> str:
    kind = packet(node)
    return getattr(kind, "__name__", "") or node.op


def _ordered_above(
    view: fx.Node, views: dict[fx.Node, Arrangement], shard: tuple[int, ...], dim: int
) -> fx.Node | None:
    """The view, or what it is a view of, with the elements in the order of the whole value."""
    while view in views:
        if in_order(views[view], shard, dim):
            return view
        view = view.all_input_nodes[0]
    return None


def _terms(node: fx.Node, layout: Arrangement, shard: tuple[int, ...], n: int) -> list[_Term] | str:
    """The products of which a value, with that layout, is the sum; why it is none."""
    if len(node.users) != 1:
        return f"{len(node.users)} operators read what is summed"
    if is_rearranged(node):
        known = above(node, layout)
        if known is None:
            return f"the rows of what is summed are cut ({_name(node)})"
        return _terms(node.all_input_nodes[0], known, shard, n)
    if node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        found: list[_Term] = []
        for one in node.args:
            bias = _divided_bias(one, n)
            same = isinstance(one, fx.Node) and one.meta["val"].shape == node.meta["val"].shape
            if bias is not None:
                found.append(_Term(None, None, None, bias))
                continue
            terms = _terms(one, layout, shard, n) if same else "it is broadcast"  # type: ignore[arg-type]
            if isinstance(terms, str):
                return terms
            found += terms
        return found
    if node.target is aten.mm.default or (node.target is aten.addmm.default and not node.kwargs):
        dim = split_dim(layout, shard)
        rows, weight = node.args[-2:]
        bias = _divided_bias(node.args[0], n) if len(node.args) == 3 else None
        if dim is None:
            return "the dim that is scattered is none of the rows of a product"
        if len(node.args) == 3 and bias is None:
            return "what ranks add to their products is no equal share of one bias"
        assert isinstance(rows, fx.Node) and isinstance(weight, fx.Node)
        return [_Term(rows, weight, dim, bias)]
    if node.target is aten.constant_pad_nd.default:
        return _PADDED
    return f"what is summed is made by {_name(node)}, which is no product of two matrices"


def _divided_bias(node: Any, n: int) -> fx.Node | None:
    """The bias, the same on all ranks, of which each adds its share, 1 / n, to its product."""
    if not isinstance(node, fx.Node) or node.target is not aten.div.Tensor:
        return None
    shared = (node.meta.get("custom") or {}).get(CHANGE, "").endswith(f": {I} -> {P}")
    bias, ranks = node.args
    return bias if shared and ranks == n and node.meta["val"].dim() == 1 else None  # type: ignore[return-value]
