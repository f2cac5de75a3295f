"""Attention to ranges of keys by torch's FlashAttention kernels of sequences of many lengths.

Those take a window and where each document begins, and no mask. Hidden keys (padding) are one more
feature of queries and keys: their scores are so low that their part of the sum is exactly zero.
`torch.nn.attention.varlen` calls the same kernels, but wants the longest document as a number when
it is traced; here it is read when the kernel is called.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default

WIDEST_HEAD = 256
"""Features of a head that the kernels take, with the one of hidden keys."""

_MULTIPLE = 8  # of which the kernels want a head's features
_FAR = 2.0**14  # its square, times any scale, is beyond every other score; it fits float16


class Spans(NamedTuple):
    """Where the documents begin, among all queries and all keys: int32 [documents + 1], and the
    most queries and keys that one has."""

    queries: torch.Tensor
    keys: torch.Tensor
    most_queries: int
    most_keys: int


def available(query: torch.Tensor) -> bool:
    """Whether the kernels take such queries, by device and dtype."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def whole_sequences(batch: int, rows: int, keys: int, device: torch.device) -> Spans:
    """Each sequence as one document."""
    queries, own = (
        torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        for length in (rows, keys)
    )
    return Spans(queries, own, rows, keys)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor | None,
    visible: torch.Tensor | None,
    window: int | None,
    scale: float,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `by_blocks.forward`; the kernel aligns the last query of a document with its last key.
    first: read where some keys are hidden only."""
    batch, _, rows, _ = query.shape
    operands = _operands(query, key, value, visible)
    options = {"scale": scale, "window_size_left": _left(window), "window_size_right": 0}
    out, sums, *_ = _forward(*operands, *spans, 0.0, window is None, False, **options)
    out = out.unflatten(0, (batch, rows)).transpose(1, 2)[..., : value.shape[-1]]
    if visible is not None:
        assert first is not None
        out = out * _sees_any(visible, first)[:, None, :, None]
    return out, sums.unflatten(1, (batch, rows)).transpose(0, 1)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    first: torch.Tensor | None,
    visible: torch.Tensor | None,
    window: int | None,
    scale: float,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `by_blocks.backward`."""
    batch = query.shape[0]
    operands = _operands(query, key, value, visible)
    width = operands[0].shape[-1]
    if visible is not None:
        assert first is not None
        gradient = gradient * _sees_any(visible, first)[:, None, :, None]
    given, made = (_tokens(_widened(x, width)) for x in (gradient, out))
    drawn = torch.zeros(2, dtype=torch.uint64, device=query.device)  # nothing is dropped
    options = {"scale": scale, "window_size_left": _left(window), "window_size_right": 0}
    found = _backward(
        given,
        *operands,
        made,
        sums.transpose(0, 1).flatten(1),
        *spans,
        0.0,
        window is None,
        drawn,
        torch.empty(0, device=query.device),
        **options,
    )
    gradients = [
        grad.unflatten(0, (batch, -1)).transpose(1, 2)[..., : one.shape[-1]]
        for grad, one in zip(found, (query, key, value))
    ]
    return gradients[0], gradients[1], gradients[2]


def _sees_any(visible: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Whether each query row sees a key: bool [batch, rows]. visible: [batch, 1, 1, keys]."""
    until = visible.flatten(1).cumsum(-1)
    until = torch.nn.functional.pad(until, (1, 0))  # how many are before each place
    rows, keys = first.shape[1], until.shape[1] - 1
    before = until.gather(1, first.expand(until.shape[0], -1))
    return until.expand(before.shape[0], -1)[:, keys - rows + 1 :] > before


def _left(window: int | None) -> int:
    """How many keys before its own a query sees; -1: all."""
    return -1 if window is None else window - 1


def _operands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
) -> list[torch.Tensor]:
    """Queries, keys and values as [tokens, heads, features], of as many features each."""
    if visible is not None:
        near = query.new_full((*query.shape[:3], 1), _FAR)
        far = torch.where(visible, 0.0, -_FAR).to(key.dtype).squeeze(2).unsqueeze(-1)
        far = far.expand(*key.shape[:3], 1)
        query, key = torch.cat([query, near], -1), torch.cat([key, far], -1)
    most = max(x.shape[-1] for x in (query, key, value))
    width = -(-most // _MULTIPLE) * _MULTIPLE
    return [_tokens(_widened(x, width)) for x in (query, key, value)]


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros up to `width` features. A padding of nothing would copy: eight kernels a layer."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, features] as [batch * rows, heads, features]."""
    return x.transpose(1, 2).flatten(0, 1)
