"""fuse_written: attention that a model writes out becomes `operators.attention`.

    before                                              after
    %0: f32[b,8,d,s] = transpose(%k, -1, -2)            %7: f32[b,8,s,d] = attention(%q, %k, %v, %m,
    %1: f32[b,8,s,s] = matmul(%q, %0)                       scale=0.25, softcap=50.0)
    %2: f32[b,8,s,s] = mul(%1, 0.25)
    ... tanh(%2 / 50) * 50 ...
    %5: f32[b,8,s,s] = add(%4, %m)
    %6: f32[b,8,s,s] = softmax(%5, -1)
    %7: f32[b,8,s,d] = matmul(%6, %v)

Found from each softmax: down to the product of queries and keys through scales, a soft cap, masks
and biases that are added, masks that fill in a number which softmax makes nothing of, a column of
sinks that is joined on, what is subtracted from a whole row, casts, and heads joined with the
batch; up to the product with the values.

Not done: scales that are tensors.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.graph import valued_call
from autoshard.export.rank_graph.operators import NONE, attention
from autoshard.passes import Context, Pass, Report, permutation

aten = torch.ops.aten

_SOFTMAX = (aten.softmax.int, aten._softmax.default)


@dataclass
class _Scores:
    """What stands between a softmax and the product of queries and keys, outermost first.

    split: the reshape of [batch * heads, ...] to [batch, heads, ...], where there is one. terms:
    what is added, or the choice that hides scores, and the reshape where that is of joined heads.
    """

    terms: list[tuple[fx.Node, fx.Node | None]] = field(default_factory=list)
    scale: float = 1.0
    softcap: float | None = None
    sinks: fx.Node | None = None
    split: fx.Node | None = None
    product: fx.Node | None = None


@dataclass(frozen=True)
class FuseWritten(Pass):
    """See the module's text."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite `gm.graph` in place, where the whole pattern is found."""
        for target in _SOFTMAX:
            for node in gm.graph.find_nodes(op="call_function", target=target):
                if node.args[1] not in (-1, node.meta["val"].dim() - 1):
                    report.skip(node, f"it is over dim {node.args[1]}, not the last")
                elif reason := _fuse(gm.graph, node):
                    report.skip(node, reason)
                else:
                    report.hits += 1
        gm.graph.eliminate_dead_code()


def _fuse(graph: fx.Graph, softmax: fx.Node) -> str:
    """Rewrite one attention; why not, where it is none."""
    found = _values_product(softmax)
    scores = _read(softmax.args[0], _Scores())
    if found is None or scores is None or scores.product is None:
        return "it is not between a product of queries and keys and one with values"
    final, dropped, joined = found
    if dropped != (scores.sinks is not None) or joined != (scores.split is not None):
        return "a column of sinks, or heads joined with the batch, is on one side of it only"
    operands: Any = (*scores.product.args[:2], final.args[1])
    query, turned, value = operands
    if any(node.meta["val"].dim() != (3 if joined else 4) for node in operands):
        return f"its products are not of {3 if joined else 4} dims each"
    with graph.inserting_before(final):
        key = _transposed(turned)
        query, key = _narrow(query, key, value)
        if not _fit(query, key, value):
            return "batches or heads are not those of grouped heads"
        if scores.split is not None:
            sizes = [_sizes(query)[0], _sizes(value)[1]]
            shape: Any = scores.split.args[1]
            batch, heads = shape[:2]

            def apart(node: Any) -> fx.Node:
                source: Any = node.args[0] if node.target is aten.reshape.default else None
                if source is not None and source.meta["val"].dim() == 4:
                    if str(source.meta["val"].shape[1]) == str(heads):
                        return source  # type: ignore[no-any-return]
                shape = [batch, heads, *_sizes(node)]
                return valued_call(node, aten.reshape.default, node, shape)

            query, key, value = apart(query), apart(key), apart(value)
        mask: fx.Node | None = None
        for one, within in scores.terms:
            term = _apart(_added(one), within)
            if term is None:
                return "a term of joined heads has other dims than the scores"
            mask = term if mask is None else valued_call(term, aten.add.Tensor, mask, term)
        kwargs: dict[str, Any] = {"causal": NONE, "scale": scores.scale}
        if scores.softcap is not None:
            kwargs["softcap"] = scores.softcap
        if scores.sinks is not None:
            kwargs["sinks"] = scores.sinks
        new = valued_call(softmax, attention, query, key, value, mask, **kwargs)
        if scores.split is not None:
            new = valued_call(final, aten.reshape.default, new, [-1, *sizes])
    final.replace_all_uses_with(new)
    return ""


def _values_product(softmax: fx.Node) -> tuple[fx.Node, bool, bool] | None:
    """The product that the weights of a softmax, and nothing else, go into; whether their last
    column is dropped before, and whether their heads are joined with the batch."""
    node, dropped, joined = softmax, False, False
    while True:
        users = list(node.users)
        if len(users) != 1:
            return None
        (user,) = users
        if user.target is aten.matmul.default and user.args[0] is node:
            return user, dropped, joined
        last = node.meta["val"].dim() - 1
        if user.target is aten.slice.Tensor and not dropped:
            dropped = user.args[1] in (-1, last) and user.args[2:] in ((0, -1), (0, -1, 1))
            if not dropped:
                return None
        elif user.target is aten.reshape.default and not joined:
            joined = True
        elif user.target is not aten._to_copy.default:
            return None
        node = user


def _read(node: Any, found: _Scores) -> _Scores | None:
    while True:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return None
        args: Any = node.args
        if node.target is aten.matmul.default:
            found.product = node
            return found
        if node.target is aten._to_copy.default:
            node = args[0]
        elif node.target is aten.sub.Tensor and _is_row(args[1]):
            if found.sinks is not None or found.softcap is not None:
                return None
            node = args[0]  # the same for a whole row: softmax takes no notice
        elif node.target is aten.cat.default and found.sinks is None and len(args[0]) == 2:
            if args[1:] not in ((-1,), (3,)) or node.meta["val"].dim() != 4:
                return None
            found.sinks = _column(args[0][1])
            node = args[0][0]
            if found.sinks is None or found.terms or found.scale != 1.0:
                return None
        elif node.target is aten.reshape.default and found.split is None:
            if node.meta["val"].dim() != 4 or args[0].meta["val"].dim() != 3:
                return None
            found.split, node = node, args[0]
        elif node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
            if found.scale != 1.0 or found.softcap is not None:
                return None
            left, right = args
            inner = [one for one in (left, right) if _leads_to_product(one)]
            if len(inner) != 1:
                return None
            found.terms.append((right if inner[0] is left else left, found.split))
            node = inner[0]
        elif node.target is aten.where.self:
            if found.scale != 1.0 or found.softcap is not None:
                return None
            inner = [one for one in args[1:] if _leads_to_product(one)]
            hidden = [one for one in args[1:] if hides(one)]
            if len(inner) != 1 or len(hidden) != 1:
                return None
            found.terms.append((node, found.split))
            node = inner[0]
        elif node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(
            args[1], (int, float)
        ):
            factor = args[1] if node.target is aten.mul.Tensor else 1 / args[1]
            capped = args[0]
            if isinstance(capped, fx.Node) and capped.target is aten.tanh.default:
                if found.softcap is not None or found.scale != 1.0:
                    return None
                found.softcap, node = float(factor), capped.args[0]
                found.scale = float(factor)  # of what is capped: tanh(x / cap) * cap
                continue
            found.scale *= factor
            node = args[0]
        else:
            return None


def _leads_to_product(node: Any) -> bool:
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is aten.matmul.default:
            return True
        passed = (aten.mul.Tensor, aten.div.Tensor, aten.tanh.default, aten._to_copy.default)
        if node.target in (aten.add.Tensor, aten.where.self):
            return any(_leads_to_product(part) for part in node.args)
        if node.target not in (*passed, aten.reshape.default):
            return False
        node = node.args[0]
    return False


def hides(node: Any) -> bool:
    """Whether a value is a number so low that softmax makes nothing of it."""
    if not isinstance(node, fx.Node) or node.target is not aten.full.default:
        return False
    number: Any = node.args[1]
    return bool(number <= torch.finfo(node.meta["val"].dtype).min / 2)


def _added(term: fx.Node) -> fx.Node:
    """What is to be added to scores: of a choice that hides some, 0 for the others."""
    if term.target is not aten.where.self:
        return term
    chosen: Any = term.args
    (hidden,) = [one for one in chosen[1:] if hides(one)]
    none = valued_call(hidden, aten.full.default, [], 0, dtype=hidden.meta["val"].dtype)
    values = [hidden, none] if chosen[1] is hidden else [none, hidden]
    return valued_call(term, aten.where.self, chosen[0], *values)


def _is_row(node: Any) -> bool:
    """Whether a value has one number for each row of scores."""
    return isinstance(node, fx.Node) and node.meta["val"].shape[-1] == 1


def _column(node: Any) -> fx.Node | None:
    """The sinks that are repeated for every query, [1, heads, 1, 1]."""
    if node.target is aten.expand.default:
        node = node.args[0]
    shape = node.meta["val"].shape
    return node if len(shape) == 4 and tuple(shape[2:]) == (1, 1) else None


def _transposed(turned: fx.Node) -> fx.Node:
    """The keys whose last two dims were exchanged."""
    rank = turned.meta["val"].dim()
    if permutation(turned) == [*range(rank - 2), rank - 1, rank - 2]:
        return turned.args[0]  # type: ignore[return-value]
    return valued_call(turned, aten.transpose.int, turned, -1, -2)


def _fit(query: fx.Node, key: fx.Node, value: fx.Node) -> bool:
    """Whether batches and heads are those of grouped heads, none broadcast."""
    shapes = [node.meta["val"].shape for node in (query, key, value)]
    if len({str(shape[0]) for shape in shapes}) != 1:
        return False
    if len(shapes[0]) == 3:
        return True
    heads = [shape[1] for shape in shapes]
    return heads[1] == heads[2] and heads[0] % heads[1] == 0


def _narrow(query: Any, key: Any, value: fx.Node) -> tuple[Any, Any]:
    """Queries and keys as they were before they were widened: attention computes in float32."""
    sources = []
    for node in (query, key):
        source = node.args[0] if node.target is aten._to_copy.default else None
        if source is None or source.meta["val"].dtype != value.meta["val"].dtype:
            return query, key
        sources.append(source)
    return sources[0], sources[1]


def _apart(term: fx.Node, split: fx.Node | None) -> fx.Node | None:
    """A term for scores of [batch, heads, queries, keys]; of [batch * heads, ...] taken apart."""
    if split is None:
        return term
    if term.meta["val"].dim() != 3:
        return None
    shape: Any = split.args[1]
    return valued_call(term, aten.reshape.default, term, [*shape[:2], *_sizes(term)])


def _sizes(node: fx.Node) -> list[Any]:
    """The last two sizes of a tensor, as arguments."""
    shape = node.meta["val"].shape
    found = []
    for dim in range(len(shape) - 2, len(shape)):
        size: Any = shape[dim]
        if not isinstance(size, int):
            size = node.graph.call_function(aten.sym_size.int, (node, dim))
            size.meta["val"] = shape[dim]
        found.append(size)
    return found
