"""One attention of a decoder: heads, norms, rotary embedding, which rows of which weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors, AttentionSite
from autoshard.export.decoder.probing import close, evaluate, sources
from autoshard.export.decoder.structure import Attention, Linear, Norm, Rotary
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph


def read_attention(
    graph: ModelGraph, found: Anchors, site: AttentionSite, dense: fx.Node
) -> Attention:
    """The attention at `site`, whose result the projection `dense` reads.

    Raises ExportError where it is not causal, or its heads are not consecutive groups.
    """
    return _Attention(graph, found, site).read(dense)


@dataclass(frozen=True)
class _Operand:
    """Query, key or value: [heads, head_dim] rows of its projection, times `factor`."""

    projection: fx.Node
    rows: Tensor
    factor: float
    norm: Norm | None
    rotary: Rotary | None


class _Attention:
    def __init__(self, graph: ModelGraph, found: Anchors, site: AttentionSite) -> None:
        self.graph, self.found, self.site, self.node = graph, found, site, site.node
        self.length = site.query.meta["val"].shape[-2]

    def read(self, dense: fx.Node) -> Attention:
        window, slopes = self._mask()
        scale, softcap = self._scale()
        query = self._operand("query", self.site.query)
        key = self._operand("key", self.site.key, self.site.turned)
        value = self._operand("value", self.site.value)
        heads, head_dim = query.rows.shape
        if value.rotary is not None or value.norm is not None or value.factor != 1:
            raise export_error("its value is not rows of its projection", self.node)
        if not _same(query.rotary, key.rotary):
            raise export_error(
                "query and key are not turned by the same rotary embedding", self.node
            )
        kv_heads = _heads(key.rows)
        widths = {key.rows.shape[1], value.rows.shape[1]}
        if kv_heads != _heads(value.rows) or widths != {head_dim}:
            raise export_error("keys and values differ in their heads", self.node)
        self._order(dense, heads, head_dim)
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query=self._linear(query.projection, query.rows),
            key=self._linear(key.projection, self._grouped(key.rows, kv_heads, heads)),
            value=self._linear(value.projection, self._grouped(value.rows, kv_heads, heads)),
            dense=self.found.linear[dense],
            query_norm=query.norm,
            key_norm=key.norm,
            rotary=query.rotary,
            scale=scale * query.factor * key.factor,
            softcap=softcap,
            slopes=slopes,
            window=window,
            node=self.node,
        )

    def _mask(self) -> tuple[int | None, Tensor | None]:
        """(window, slopes of ALiBi) of what is added to the scores."""
        length = self.length
        bias = self.site.scores(self.graph, 0.0).reshape(-1, length, length)
        allowed = bias[0] > -1e4
        back = torch.arange(length).unsqueeze(1) - torch.arange(length)
        window = int(allowed[-1].sum())
        lower = (back >= 0) & (back < window)
        slopes = torch.zeros(len(bias), dtype=torch.float64)
        if length > 1 and window > 1:
            slopes = bias[:, -1, -1] - bias[:, -1, -2]
        # a softmax does not see what is added to a whole row
        own = bias.diagonal(dim1=1, dim2=2).unsqueeze(2)
        expected = own - slopes[:, None, None] * back
        same = torch.isclose(bias, expected, rtol=1e-5, atol=1e-6)
        if torch.equal(allowed, lower) and bool((same | ~lower).all()):
            if bool(((bias > -1e4) == lower).all()):
                sloped = slopes if bool((slopes != 0).any()) else None
                return (None if window == length else window), sloped
        raise export_error(
            "attention is not causal, or its mask adds a bias that is not ALiBi's",
            self.node,
            "The checkpoint format stands for plain causal attention.",
        )

    def _scale(self) -> tuple[float, float | None]:
        """(scale, c) of c * tanh(product * scale / c), c None where there is no cap."""

        def score(product: float) -> float:
            return self.site.scores(self.graph, product).reshape(-1)[0].item()

        zero = score(0.0)
        scale = (score(1e-4) - zero) / 1e-4
        far = score(1e9) - zero
        cap = None if math.isclose(far, scale * 1e9, rel_tol=1e-6) else far
        for product in (0.5, 3.0, 40.0, 900.0):
            plain = product * scale
            expected = plain if cap is None else cap * math.tanh(plain / cap)
            if not math.isclose(score(product) - zero, expected, rel_tol=1e-5, abs_tol=1e-8):
                raise export_error("scores are neither scaled nor capped by tanh", self.node)
        return float(f"{scale:.7g}"), None if cap is None else float(f"{cap:.7g}")

    def _operand(self, name: str, operand: fx.Node, turned: bool = False) -> _Operand:
        graph, found = self.graph, self.found
        read = sources(operand, found.all())
        norm = read[0] if len(read) == 1 and read[0] in found.norm else None
        projections = read if norm is None else sources(found.normed[norm], found.all())
        if len(projections) != 1 or projections[0] not in found.linear:
            raise export_error(f"its {name} is not one projection, reshaped and rotated", self.node)
        (projection,) = projections
        shape, outputs = projection.meta["val"].shape, found.linear[projection].outputs
        batch = math.prod(shape[:-1]) // self.length

        def by_head(given: dict[fx.Node, Tensor]) -> Tensor:
            value = evaluate(graph, operand, given)
            value = value.transpose(-1, -2) if turned else value
            return value.reshape(batch, -1, *value.shape[-2:])[0]

        def run(row_values: Tensor) -> Tensor:
            values = row_values.expand(shape)
            if norm is None:
                return by_head({projection: values})
            # the norm itself is passed by: its rows are those of what it normalises
            return by_head({norm: evaluate(graph, found.normed[norm], {projection: values})})

        first = run(torch.ones(outputs, dtype=torch.float64))[:, 0]
        if not bool((first != 0).all()) or not torch.allclose(first, first[:1].expand_as(first)):
            raise export_error(f"its {name} is not made of rows of its projection", self.node)
        # dims that a rotary embedding turns may be multiplied by more than those that it leaves
        factors = first[0]
        factor = factors[-1].item()
        by_position = run(torch.arange(outputs, dtype=torch.float64)) / factors
        rows = by_position[:, 0].round().long()
        exact = torch.allclose(rows.double(), by_position[:, 0], rtol=1e-9)
        if not exact or not bool(((rows >= 0) & (rows < outputs)).all()):
            raise export_error(f"its {name} is not made of rows of its projection", self.node)
        if norm is not None:
            self._normed_by_head(norm, by_head, factors)
        layer_norm = None if norm is None else found.norm[norm]
        turned_factors = factors / factor
        still = torch.allclose(by_position, by_position[:, :1].expand_as(by_position), rtol=1e-9)
        if still and bool(torch.isclose(turned_factors, torch.ones_like(factors)).all()):
            return _Operand(projection, rows, factor, layer_norm, None)
        head = rows[0]

        def rotated(values: Tensor) -> Tensor:
            spread = torch.zeros(outputs, dtype=torch.float64)
            spread[head] = values
            return run(spread)[0] / factors

        turns = None
        if not still:
            turns = _rotation(rotated, turned_factors, self._precision(operand))
        if turns is None:
            raise export_error(
                f"its {name} depends on the position otherwise than by a rotary embedding of its "
                f"{len(head)} dims, in halves or in neighbours",
                self.node,
            )
        return _Operand(projection, rows, factor, layer_norm, turns)

    def _normed_by_head(self, norm: fx.Node, by_head: object, factors: Tensor) -> None:
        """The norm must be over each head, its weights in the order of the head's dims."""
        shape = norm.meta["val"].shape
        weights = torch.arange(1, shape[-1] + 1, dtype=torch.float64)
        found = by_head({norm: weights.expand(shape)})[:, 0] / factors  # type: ignore[operator]
        if shape[-1] != len(factors) or not torch.allclose(
            found, weights.expand_as(found), rtol=1e-9
        ):
            raise export_error("queries or keys are not normalised over each head", self.node)

    def _precision(self, operand: fx.Node) -> float:
        """Relative, of the coarsest constant that an operand depends on."""
        read = sources(operand, {**self.found.all(), **self.graph.constants})
        dtypes = [self.graph.constants[n].dtype for n in read if n in self.graph.constants]
        return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)

    def _grouped(self, rows: Tensor, kv_heads: int, heads: int) -> Tensor:
        """The rows of each distinct head, where consecutive query heads share one."""
        distinct = rows[:: rows.shape[0] // kv_heads]
        if rows.shape[0] not in (kv_heads, heads) or not torch.equal(
            distinct.repeat_interleave(rows.shape[0] // kv_heads, 0), rows
        ):
            raise export_error(
                "query heads do not share key heads in consecutive groups", self.node
            )
        return distinct

    def _linear(self, projection: fx.Node, rows: Tensor) -> Linear:
        return replace(self.found.linear[projection], rows=rows.flatten())

    def _order(self, dense: fx.Node, heads: int, head_dim: int) -> None:
        """The dense projection must read head 0, head 1, ... with their dims in order."""
        shape = self.node.meta["val"].shape
        width = heads * head_dim
        by_head = torch.arange(width, dtype=torch.float64).view(heads, 1, head_dim)
        values = by_head.expand(heads, *shape[-2:]).repeat(
            shape.numel() // (width * shape[-2]), 1, 1
        )
        read = evaluate(self.graph, self.found.inputs[dense], {self.node: values.view(shape)})
        if not bool((read == torch.arange(width)).all()):
            raise export_error("does not read the heads of attention in order", dense)


def _heads(rows: Tensor) -> int:
    """The number of distinct heads."""
    return len(torch.unique(rows, dim=0))


def _same(left: Rotary | None, right: Rotary | None) -> bool:
    if left is None or right is None:
        return left is right
    same = (left.dim, left.interleaved) == (right.dim, right.interleaved)
    alike = math.isclose(left.magnitude, right.magnitude, rel_tol=1e-6)
    return same and alike and torch.allclose(left.angles, right.angles, rtol=1e-6, atol=0)


def _rotation(
    rotated: Callable[[Tensor], Tensor], factors: Tensor, precision: float
) -> Rotary | None:
    """The rotary embedding that `rotated` is, [head_dim] of an unrotated head -> [positions,
    head_dim]; None: it is none. factors: of each dim, beside those that do not turn. precision:
    relative, of its tables.
    """
    tolerance = max(1e-5, 4 * precision)
    ones = torch.ones_like(factors)
    other = torch.linspace(-1, 1, len(factors), dtype=torch.float64).square() + 0.25
    of_ones, of_other = rotated(ones)[1], rotated(other)[1]
    turns = ((of_ones - ones).abs() > 1e-11) | ((of_other - other).abs() > 1e-11)
    dim = int(turns.nonzero().max()) + 1 if bool(turns.any()) else 0
    places = torch.arange(len(factors))
    if (
        dim == 0
        or dim % 2
        or not torch.allclose(factors, torch.where(places < dim, factors[0], ones))
    ):
        return None
    for interleaved in (False, True):
        pairs = places[:dim]
        first, second = pairs.view(-1, 2).unbind(1) if interleaved else pairs.view(2, -1)
        cos = (of_ones[first] + of_ones[second]) / 2
        sin = (of_ones[second] - of_ones[first]) / 2
        expected = other.clone()
        expected[first] = other[first] * cos - other[second] * sin
        expected[second] = other[second] * cos + other[first] * sin
        one = close(cos**2 + sin**2, torch.ones_like(cos), tolerance)
        if one and close(of_other, expected, tolerance):
            return Rotary(
                angles=torch.atan2(sin, cos),
                dim=dim,
                interleaved=interleaved,
                magnitude=factors[0].item(),
                precision=precision,
            )
    return None
