"""Masked attention where a rank holds part of the query rows, and all keys and values."""

from __future__ import annotations

import torch

from autoshard.runtime.collectives import Axis, own_chunks
from autoshard.runtime.masked_attention.operator import MASKED_ATTENTION


def masked_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    window: int | None = None,
    *,
    axis: Axis,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`MASKED_ATTENTION` of this rank's query rows, of as many as there are keys; what lies after
    its last row, or before the window of its first, is not read."""
    rows, length = query.shape[-2], key.shape[-2]
    end = length if axis.rank == axis.size - 1 else (axis.rank + 1) * rows
    masks = (documents, visible)
    return _part(query, key, value, masks, window, end, scale, enable_gqa)


def masked_both_ends(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    window: int | None = None,
    *,
    axis: Axis,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`masked_prefix` where the rank's query rows are in head-tail order."""
    rows = query.shape[-2] // 2
    masks = (documents, visible)
    return torch.cat(
        [
            _part(part, key, value, masks, window, (chunk + 1) * rows, scale, enable_gqa)
            for chunk, part in zip(own_chunks(axis), query.split(rows, -2))
        ],
        -2,
    )


def _part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: tuple[torch.Tensor | None, torch.Tensor | None],
    window: int | None,
    end: int,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Of the query rows that stand before `end`."""
    start = 0 if window is None else max(0, end - query.shape[-2] - window + 1)
    documents, visible = (None if one is None else one[..., start:end] for one in masks)
    made: torch.Tensor = MASKED_ATTENTION(
        query,
        *(x.narrow(-2, start, end - start) for x in (key, value)),
        documents,
        visible,
        window,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return made
