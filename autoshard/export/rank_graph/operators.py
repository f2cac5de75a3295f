"""The operators of a rank graph that ATen has not: what an engine runs as one layer.

Plain functions of tensors: a rank graph that holds them runs in torch, which is how it is checked.
"""

import torch
from torch import fx

NONE = "none"
UPPER_LEFT = "upper_left"
LOWER_RIGHT = "lower_right"


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    causal: str = NONE,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale · query keyᵀ) value, over grouped heads: [b, h, t, d], d of `value`.

    query: [b, h, t, d]. key, value: [b, g, s, d], g dividing h; consecutive query heads share one.
    mask: broadcast to [b, h, t, s]; True or 0 where a query may look. lengths: [b], how many keys
    of each row count, all where it is None. causal: "upper_left": query i sees the keys up to i;
    "lower_right": the last query sees all keys that count, the one before one less, ...
    softcap: scores s become softcap · tanh(s / softcap). sinks: [1, h, 1, 1], a score beside those
    of the keys, whose value is 0. No engine has a layer for these two: `expand_attention` writes
    them out.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    t, s = query.shape[2], key.shape[2]
    rows = torch.arange(t, device=query.device).view(1, 1, t, 1)
    columns = torch.arange(s, device=query.device).view(1, 1, 1, s)
    seen = None
    if lengths is not None:
        ends = lengths.view(-1, 1, 1, 1)
        seen = columns < ends
    if causal == UPPER_LEFT:
        seen = columns <= rows if seen is None else seen & (columns <= rows)
    elif causal == LOWER_RIGHT:
        last = rows + ((s if lengths is None else ends) - t)
        seen = columns <= last if seen is None else seen & (columns <= last)
    if seen is not None:
        if mask is None:
            mask = seen
        elif mask.dtype == torch.bool:
            mask = mask & seen
        else:
            mask = mask.masked_fill(~seen, float("-inf"))
    if softcap is not None or sinks is not None:
        return _written_out(query * scale, key, value, mask, softcap, sinks)
    result: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale
    )
    return result


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = (query @ key.transpose(-1, -2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.expand(scores.shape[0], -1, scores.shape[2], 1).float()
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def update_cache(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """`cache` [b, g, s, d] with `update` [b, g, t, d] written at rows start[b] ... of each row.

    start: [b] integers; start + t <= s. In an engine the result is the memory of `cache`.
    """
    t = update.shape[2]
    rows = start.long().view(-1, 1) + torch.arange(t, device=cache.device)
    index = rows.view(-1, 1, t, 1).expand(update.shape)
    return cache.scatter(2, index, update.to(cache.dtype))


def dequantize(
    values: torch.Tensor, scale: torch.Tensor, block: list[int], *, dtype: torch.dtype
) -> torch.Tensor:
    """`values` [rows, columns] times the scale of their block, in `dtype`.

    scale: [rows / r, columns / c] for `block` [r, c], rounded up. values: int8 or fp8; numbers of 4
    bits are int8 here too.
    """
    spread = scale.repeat_interleave(block[0], 0)[: values.shape[0]]
    spread = spread.repeat_interleave(block[1], 1)[:, : values.shape[1]]
    return (values.to(scale.dtype) * spread).to(dtype)


def is_expanded(node: fx.Node) -> bool:
    """Whether an attention has what no layer has: a soft cap of its scores, or sinks."""
    return node.kwargs.get("softcap") is not None or node.kwargs.get("sinks") is not None
