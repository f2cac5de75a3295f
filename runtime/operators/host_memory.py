"""Values that wait in the memory of the host from forward to backward.

    forward                                       backward
    %h = offload(%x)                              %g = reload(%k, device)
    ...                                           ...
    %k = wait_transfer(%h, %x)                    %x = wait_transfer(%g, %k)

Copies run on a stream of their own. A wait reads what the copy reads, which so is there until the
copy is done; what it returns is the copy. On GPUs they are torch's operators for that; on a CPU
plain copies, so that its graphs are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.runtime import compat

_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define("offload(Tensor x) -> Tensor")
_library.define("reload(Tensor kept, Device device) -> Tensor")
_library.define("wait_transfer(Tensor(a) moved, Tensor source) -> Tensor(a)")


def _like(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return _like(x, "cpu").copy_(x)


def _send(x: torch.Tensor) -> torch.Tensor:
    return _in_memory_order(x, lambda rows: compat.transfers().offload(rows))


def _fetch(kept: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return _copy(kept)
    return _in_memory_order(kept, lambda rows: compat.transfers().reload(rows, device))


def _in_memory_order(x: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`move` of a contiguous view of the same memory, with the strides of `x`."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], dim))
    back = sorted(range(x.dim()), key=order.__getitem__)
    return move(x.permute(order)).permute(back)


def _wait(moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if moved.device != source.device:
        compat.transfers().wait_tensor(moved)
    return moved


_library.impl("offload", _copy, "CPU")
_library.impl("offload", _send, "CUDA")
_library.impl("reload", _fetch, "CPU")
_library.impl("wait_transfer", _wait, "CompositeExplicitAutograd")

for _name, _fake in (
    ("offload", lambda x: _like(x, "cpu")),
    ("reload", _like),
    ("wait_transfer", lambda moved, source: moved),
):
    torch.library.register_fake(f"autoshard::{_name}", _fake, lib=_library)

OFFLOAD = torch.ops.autoshard.offload.default
RELOAD = torch.ops.autoshard.reload.default
WAIT_TRANSFER = torch.ops.autoshard.wait_transfer.default

compat.ON_HOST.add(OFFLOAD)
