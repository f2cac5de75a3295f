"""Attention to ranges of keys in blocks of query rows: no scores but those of a block exist, and
keys before the first that a block sees are not read. On any device, in any dtype."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

_ROWS = 128


class _Block(NamedTuple):
    """Query rows, the keys that any of them sees, and which of those each does not see.

    hidden: bool [batch, 1, 1, rows, keys], over [batch, shared heads, heads to each, rows, keys].
    """

    rows: slice
    keys: slice
    hidden: torch.Tensor


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the result [batch, heads, rows, width], the logarithm of each row's sum [batch, heads,
    rows]). first: of `first_keys`. visible: [batch, 1, 1, keys]. A row that sees no key is zero."""
    wide = widened(query.dtype)
    queries = _grouped(query, key)
    out = query.new_zeros((*queries.shape[:4], value.shape[-1]))
    sums = torch.zeros(queries.shape[:4], dtype=wide, device=query.device)
    for block in _blocks(first, visible, key.shape[2]):
        scores = _scores(queries, key, block, scale, wide)
        peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
        parts = (scores - peak).exp_()
        total = parts.sum(-1, keepdim=True)
        # where no key is seen, parts are zeros
        result = _product(parts, value[:, :, block.keys].to(wide)) / total.clamp(min=1e-30)
        out[..., block.rows, :] = result.to(out.dtype)
        seen = total > 0
        sums[..., block.rows] = torch.where(seen, peak + total.log(), 0.0).squeeze(-1)
    return out.flatten(1, 2), sums.flatten(1, 2)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    first: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys and values; scores are computed again."""
    wide = widened(query.dtype)
    queries, results, gradients = (_grouped(x, key) for x in (query, out, gradient))
    totals = _grouped(sums.unsqueeze(-1), key)
    by_query = torch.zeros_like(queries, dtype=wide)
    by_key, by_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
    for block in _blocks(first, visible, key.shape[2]):
        rows, keys = block.rows, block.keys
        parts = (_scores(queries, key, block, scale, wide) - totals[..., rows, :]).exp_()
        grad, own = (x[..., rows, :].to(wide) for x in (gradients, results))
        by_value[:, :, keys] += _transposed_product(parts, grad)
        by_parts = _product(grad, value[:, :, keys].to(wide).mT)
        by_score = parts * (by_parts - (grad * own).sum(-1, keepdim=True)) * scale
        by_query[..., rows, :] = _product(by_score, key[:, :, keys].to(wide))
        by_key[:, :, keys] += _transposed_product(by_score, queries[..., rows, :].to(wide))
    return (
        by_query.flatten(1, 2).to(query.dtype),
        by_key.to(key.dtype),
        by_value.to(value.dtype),
    )


def widened(dtype: torch.dtype) -> torch.dtype:
    """In what scores and sums are computed."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(first: torch.Tensor, visible: torch.Tensor | None, keys: int) -> Iterator[_Block]:
    count = first.shape[1]
    before = keys - count  # keys before the first query's own
    place = torch.arange(keys, device=first.device)
    for start in range(0, count, _ROWS):
        rows = slice(start, min(start + _ROWS, count))
        begin = int(first[:, rows].min())
        seen = slice(begin, before + rows.stop)
        own = place[before + rows.start : before + rows.stop]
        outside = (place[seen] < first[:, rows, None]) | (place[seen] > own[:, None])
        if visible is not None:
            outside = outside | ~visible.flatten(1)[:, None, seen]
        yield _Block(rows, seen, outside[:, None, None])


def _grouped(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch, heads, ..] as [batch, shared heads, heads to each, ..]."""
    return x.unflatten(1, (key.shape[1], -1))


def _scores(
    queries: torch.Tensor, key: torch.Tensor, block: _Block, scale: float, wide: torch.dtype
) -> torch.Tensor:
    rows = queries[..., block.rows, :].to(wide) * scale
    scores = _product(rows, key[:, :, block.keys].to(wide).mT)
    return scores.masked_fill_(block.hidden, -torch.inf)


def _product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rows [batch, shared, each, m, k] @ matrix [batch, shared, k, n], which is not repeated."""
    return (rows.flatten(2, 3) @ matrix).unflatten(2, rows.shape[2:4])


def _transposed_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The sum over heads and rows: [batch, shared, each, m, k] and [.., m, n] -> [.., k, n]."""
    return left.flatten(2, 3).mT @ right.flatten(2, 3)
