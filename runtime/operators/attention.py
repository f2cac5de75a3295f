"""Attention where a rank holds part of the heads, or part of the query rows."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from autoshard.runtime.collectives import Axis, S, own_chunks, redistribute


def attend_to_shared_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    op: Callable[..., torch.Tensor],
    dim: int,
    axis: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention where several ranks share a key head: each picks the one its queries attend to.

    query holds this rank's heads along `dim`; key and value hold all of theirs, fewer than ranks.
    """
    own = axis.rank * key.shape[dim] // axis.size
    return op(query, key.narrow(dim, own, 1), value.narrow(dim, own, 1), *args, **kwargs)


def attend_by_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    op: Callable[..., torch.Tensor],
    axis: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention where each rank holds its rows of all sequences, of every head that it is given.

    Which heads those are is the caller's affair: another axis may have split them before, and each
    of its ranks exchanges its own. The axis divides their number, of queries and of keys.
    """
    heads, rows = S(query.dim() - 3), S(query.dim() - 2)
    own = (redistribute(x, rows, heads, axis) for x in (query, key, value))
    return redistribute(op(*own, *args, **kwargs), heads, rows, axis)


def attend_to_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    axis: Axis,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of this rank's query rows to the keys and values up to each of them.

    query holds this rank's rows of as many as there are keys; what lies after its last row is not
    read at all.
    """
    rows, length = query.shape[-2], key.shape[-2]
    end = length if axis.rank == axis.size - 1 else (axis.rank + 1) * rows
    own: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    return lower_right(query, key.narrow(-2, 0, end), value.narrow(-2, 0, end), **own)


def attend_to_both_ends(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    axis: Axis,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`attend_to_prefix` where the rank's query rows are in head-tail order: a chunk of the head of
    the sequence, then one of its tail."""
    rows = query.shape[-2] // 2
    own: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    results = []
    for i, chunk in enumerate(own_chunks(axis)):
        end = (chunk + 1) * rows
        seen = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
        results.append(lower_right(query.narrow(-2, i * rows, rows), *seen, **own))
    return torch.cat(results, -2)


def lower_right(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention whose last query sees the last key: `is_causal` aligns the first ones."""
    rows, length, width = query.shape[-2], key.shape[-2], query.shape[-1]
    own: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if isinstance(rows, int) and rows == length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **own)
    if query.device.type == "cuda":
        asked = SDPAParams(query, key, value, None, dropout_p, False, enable_gqa)
        if can_use_flash_attention(asked):
            # which aligns as is wanted; torch.nn.attention.bias calls it too, but cannot be traced
            inputs = [F.pad(x, (0, -width % 8)) for x in (query, key, value)]
            scale = width**-0.5 if scale is None else scale
            result = _flash(*inputs, dropout_p, is_causal=True, scale=scale)[0]
            return result[..., :width]
    mask = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(length - rows)
    return F.scaled_dot_product_attention(query, key, value, mask, **own)


_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
