"""What stands between two matrix products of an inference layer, as one operator: the partial sums
are reduced, added to the residual and normalised, and gathered where they are split.

Megatron-Core has it as the layers of `inference_layers`; vLLM fuses the same at each all-reduce.
The reduction is the backend's; the arithmetic around it is left to Inductor, which makes one kernel
of it.
"""

from __future__ import annotations

import torch

from autoshard.runtime.collectives import Axis, I, P, State, convert

aten = torch.ops.aten


def reduce_add_norm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: State,
    axis: Axis,
    *,
    norm: str,
    eps: float | None,
    wide: torch.dtype | None = None,
    weigh_wide: bool = False,
    gather: bool = False,
    extent: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual, in `state`, and its norm over the last dim, whole where `gather`.

    partial: this rank's addend. residual: in `state`, which is I or S(d). norm: "layer", or "rms";
    "written rms" is the one that models spell out, computed in `wide` and weighed before
    (`weigh_wide`) or after it is cast back. extent: of the dim that `state` splits, where the axis
    does not divide it. For graphs without gradients.
    """
    total = residual + convert(partial, P, state, axis)
    if norm == "rms":
        normed = aten.rms_norm(total, total.shape[-1:], weight, eps)
    elif norm == "layer":
        normed = aten.layer_norm(total, total.shape[-1:], weight, bias, eps)
    else:
        assert eps is not None
        normed = _written_rms(total, weight, eps, wide, weigh_wide)
    if gather:
        normed = convert(normed, state, I, axis, extent)
    return total, normed


def _written_rms(
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    wide: torch.dtype | None,
    weigh_wide: bool,
) -> torch.Tensor:
    x = total if wide is None else total.to(wide)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weigh_wide:
        return (weight * x).to(total.dtype)
    return weight * x.to(total.dtype)
