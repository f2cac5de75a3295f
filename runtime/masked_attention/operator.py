"""Causal attention to a window, to a document, to keys that are no padding, as one operator.

    autoshard::masked_attention(query, key, value, documents, visible, window, scale, enable_gqa)

A query sees the keys up to its own place of which all of these hold: they are of its document, no
further back than the window reaches, and visible. `query` [batch, heads, rows, width] are the last
rows of `key` and `value` [batch, shared heads, keys, width]; `documents`, a number that changes
where another begins, and `visible`, booleans, are [batch, 1, 1, keys]. A row that sees no key is
zero, as in torch's attention with such a mask. No tensor of rows x keys exists, and what lies
outside of windows and documents costs nothing: on a GPU by kernels of sequences of many lengths
(varlen.py), elsewhere and for what those do not take by blocks of rows (by_blocks.py).

It is composite: of documents on a GPU the bounds are an operator of their own, which layers share.
"""

from typing import Any

import torch
from torch import Tensor

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, own_chunks
from autoshard.runtime.masked_attention import by_blocks, varlen

# As in runtime/randomness/draws.py: count up when an operator gives other numbers.
_VERSION = "v1"


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    visible: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    bounds: tuple[Tensor | None, ...] = (None, None, None)
    if documents is not None and query.device.type == "cuda":
        bounds = _DOCUMENT_BOUNDS(documents, query.shape[0], query.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    made: Tensor = _ATTEND(query, key, value, documents, visible, *bounds, window, scale)[0]
    return made


def _attend(query: Tensor, key: Tensor, value: Tensor, *known: Any) -> tuple[Tensor, Tensor]:
    """(the result, logarithms of the rows' sums). known: of `_KNOWN`."""
    way, told = _way(query, key, *known)
    out, sums = way.forward(query, key, value, *told)
    return _laid_out(out), sums.contiguous()


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    *known: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    way, told = _way(query, key, *known)
    found = way.backward(gradient, query, key, value, out, sums, *told)
    return _laid_out(found[0]), _laid_out(found[1]), _laid_out(found[2])


def _way(
    query: Tensor,
    key: Tensor,
    documents: Tensor | None,
    visible: Tensor | None,
    queries: Tensor | None,
    keys: Tensor | None,
    sizes: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Any, tuple[Any, ...]]:
    """The module that computes, and what it is told besides tensors of heads. queries, keys, sizes:
    of `document_bounds`."""
    (batch, _, rows, _), length = query.shape, key.shape[2]
    by_kernel = varlen.available(query)
    first = None
    if not by_kernel or visible is not None:  # else the kernel is told the same
        first = first_keys(documents, window, rows, length, query.device)
    if not by_kernel:
        return by_blocks, (first, visible, scale)
    if queries is None or keys is None or sizes is None:
        spans = varlen.whole_sequences(batch, rows, length, query.device)
    else:
        count, *most = sizes.tolist()  # on the host already
        spans = varlen.Spans(queries[: count + 1], keys[: count + 1], *most)
    return varlen, (first, visible, window, scale, spans)


def first_keys(
    documents: torch.Tensor | None, window: int | None, rows: int, keys: int, device: torch.device
) -> torch.Tensor:
    """The first key that each of the last `rows` positions of `keys` may see: int64 [batch, rows],
    or [1, rows] where all sequences are alike.

    documents: [batch, 1, 1, keys], a number that changes where another document begins. window: how
    many keys a row sees at most, its own among them.
    """
    own = torch.arange(keys - rows, keys, device=device)
    first = torch.zeros_like(own) if window is None else (own - (window - 1)).clamp(min=0)
    first = first.unsqueeze(0)
    if documents is None:
        return first
    at = torch.arange(keys, device=device)
    begun = torch.where(_begins(documents), at, 0).cummax(-1).values
    return torch.maximum(first, begun[:, keys - rows :])


def document_bounds(
    documents: torch.Tensor, batch: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What kernels of sequences of many lengths want to know: (where each document begins among the
    queries of all sequences, among their keys, and how many documents, most queries and most keys).

    The first two are int32 [batch * keys + 1], the end repeated behind the last document; the third
    is int64 [3] on the host, which waits for it. The queries are the last `rows` of each sequence.
    """
    keys = documents.shape[-1]
    begins = _begins(documents).expand(batch, keys).reshape(-1)
    count = batch * keys
    place = torch.arange(count, device=documents.device)
    number = torch.where(begins, begins.cumsum(0) - 1, count)  # the rest is written behind the end
    ends = torch.full((count + 1,), count, device=documents.device)
    ends = ends.scatter(0, number, place)
    ends[count] = count
    before = (ends % keys - (keys - rows)).clamp(min=0)
    query_ends = ends // keys * rows + before
    sizes = torch.stack([begins.sum(), query_ends.diff().max(), ends.diff().max()])
    return query_ends.int(), ends.int(), sizes.cpu()


def _begins(documents: torch.Tensor) -> torch.Tensor:
    """bool [batch, keys]: whether a document begins at a place."""
    numbers = documents.flatten(1)
    changed = numbers[:, 1:] != numbers[:, :-1]
    return torch.nn.functional.pad(changed, (1, 0), value=True)


def _laid_out(x: Tensor) -> Tensor:
    """[batch, heads, rows, width] in memory as models read and write it: by rows, then heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(like: Tensor, width: int | torch.SymInt) -> Tensor:
    batch, heads, rows, _ = like.shape
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sums = query.new_empty(query.shape[:3], dtype=by_blocks.widened(query.dtype))
    return _empty(query, value.shape[-1]), sums


def _attend_backward_fake(gradient: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_empty(x, x.shape[-1]) for x in rest[:3])
    return query, key, value


def _document_bounds_fake(
    documents: Tensor, batch: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = [
        documents.new_empty((batch * documents.shape[-1] + 1,), dtype=torch.int32) for _ in "qk"
    ]
    return bounds[0], bounds[1], torch.empty((3,), dtype=torch.int64, device="cpu")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, *known, out, sums = ctx.saved_tensors
    found = _ATTEND_BACKWARD(gradient, query, key, value, out, sums, *known, ctx.window, ctx.scale)
    return (*found, *[None] * (len(known) + 2))


_KNOWN = (
    "Tensor? documents, Tensor? visible, Tensor? queries, Tensor? keys, Tensor? sizes, "
    "int? window, float scale"
)
_QKV = "Tensor query, Tensor key, Tensor value"


MASKED_ATTENTION = compat.define_operator(
    f"masked_attention.{_VERSION}({_QKV}, Tensor? documents=None, Tensor? visible=None, "
    "int? window=None, float? scale=None, bool enable_gqa=False) -> Tensor",
    masked_attention,
)
# the host reads the number of documents: a CUDA graph would keep the first call's
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_ATTEND = compat.define_operator(
    f"attend.{_VERSION}({_QKV}, {_KNOWN}) -> (Tensor, Tensor)", _attend, _attend_fake, _UNSAFE
)
_ATTEND_BACKWARD = compat.define_operator(
    f"attend_backward.{_VERSION}(Tensor gradient, {_QKV}, Tensor out, Tensor sums, {_KNOWN})"
    " -> (Tensor, Tensor, Tensor)",
    _attend_backward,
    _attend_backward_fake,
    _UNSAFE,
)
_DOCUMENT_BOUNDS = compat.define_operator(
    f"document_bounds.{_VERSION}(Tensor documents, SymInt batch, SymInt rows)"
    " -> (Tensor, Tensor, Tensor)",
    document_bounds,
    _document_bounds_fake,
    _UNSAFE,
)
torch.library.register_autograd(
    f"autoshard::attend.{_VERSION}", _differentiate, setup_context=_keep
)


def masked_prefix(
    query: Tensor, key: Tensor, value: Tensor, *masks: Any, axis: Axis, **options: Any
) -> Tensor:
    """`MASKED_ATTENTION` of this rank's query rows, of as many as there are keys; what lies after
    its last row, or before the window of its first, is not read."""
    rows, length = query.shape[-2], key.shape[-2]
    end = length if axis.rank == axis.size - 1 else (axis.rank + 1) * rows
    return _before(end, query, key, value, *masks, **options)


def masked_both_ends(
    query: Tensor, key: Tensor, value: Tensor, *masks: Any, axis: Axis, **options: Any
) -> Tensor:
    """`masked_prefix` where the rank's query rows are in head-tail order."""
    rows = query.shape[-2] // 2
    parts = zip(own_chunks(axis), query.split(rows, -2))
    ends = [(part, (chunk + 1) * rows) for chunk, part in parts]
    return torch.cat([_before(end, one, key, value, *masks, **options) for one, end in ends], -2)


def _before(
    end: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None = None,
    visible: Tensor | None = None,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """Of the query rows that stand before `end`."""
    start = 0 if window is None else max(0, end - query.shape[-2] - window + 1)
    key, value = (x.narrow(-2, start, end - start) for x in (key, value))
    masks = [None if one is None else one[..., start:end] for one in (documents, visible)]
    made: Tensor = MASKED_ATTENTION(query, key, value, *masks, window, **options)
    return made
