"""Models and losses with mistakes of their own, importable by the processes of a local world."""

from __future__ import annotations

from typing import Any

import torch

import faults


def rank() -> int:
    """This process's rank in its world, -1 outside of any."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else -1


_losses = 0


def fails_between_calls(output: Any) -> torch.Tensor:
    """A loss that rank 1 cannot compute at its second call, while rank 0 goes on to the backward's
    collectives."""
    global _losses
    _losses += 1
    if rank() == 1 and _losses == 2:
        raise ArithmeticError("a mistake in the training loop of rank 1")
    loss: torch.Tensor = output["loss"]
    return loss


def other_model_on_rank_1() -> Any:
    """A factory that does not make the same model everywhere."""
    torch.manual_seed(1 if rank() == 1 else 0)
    made, batch = faults.model()
    if rank() == 1:
        made.norm = torch.nn.LayerNorm(faults.WIDTH, eps=1e-3)
    return made, batch
