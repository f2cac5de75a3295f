"""Causal attention where a rank holds part of the query rows, and all keys and values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from autoshard.runtime.collectives import Axis, own_chunks


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
