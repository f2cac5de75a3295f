"""The memory of the host: values that wait in it from forward to backward, and staged parameters.

    forward                                       backward
    %h = offload(%x)                              %g = reload(%k, device)
    ...                                           ...
    %k = wait_transfer(%h, %x)                    %x = wait_transfer(%g, %k)

Copies run on a stream of their own. A wait reads what the copy reads, which so is there until the
copy is done; what it returns is the copy. On GPUs they are torch's operators for that; on a CPU
plain copies, so that its graphs are the same.

Parameters and gradients of a step on the host go through it a few at a time:

    to the host      read 0   read 1   read 2   ...
    the host                  step 0   step 1   step 2   ...
    to the device                      write 0  write 1  write 2

Each parameter passes through one of three buffers, so that while the host computes with one, the
next is read and the one before is written back. On a GPU the two ways have a stream each, and the
buffers are pinned; on a CPU the copies are plain, and the order is the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from autoshard.runtime import compat


def _like(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return _like(x, "cpu").copy_(x)


def _send(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return _copy(x)
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


OFFLOAD = compat.define_operator("offload(Tensor x) -> Tensor", _send, lambda x: _like(x, "cpu"))
RELOAD = compat.define_operator("reload(Tensor kept, Device device) -> Tensor", _fetch, _like)
WAIT_TRANSFER = compat.define_operator(
    "wait_transfer(Tensor(a) moved, Tensor source) -> Tensor(a)",
    _wait,
    lambda moved, source: moved,
)

compat.ON_HOST.add(OFFLOAD)


_BUFFERS = 3
_ALIGNED = 64


class Staged(NamedTuple):
    """A parameter's part and its gradient's on the device; the same on the host, in a buffer."""

    parameter: torch.Tensor
    gradient: torch.Tensor


class Copies:
    """Plain copies, of a device that is the host."""

    def begin(self) -> None:
        """What ran until now is done before the first copy."""

    def end(self) -> None:
        """What runs from now on waits for the last copy."""

    def read(self, host: Staged, device: Staged, after: Any) -> Any:
        """Copy to the host, after a mark; a mark that says when it is there."""
        for target, source in zip(host, device):
            target.copy_(source)

    def write(self, host: Staged, device: Staged) -> Any:
        """Copy the parameter back to the device; a mark that says when it is there."""
        device.parameter.copy_(host.parameter)

    def wait(self, mark: Any) -> None:
        """Have the host wait for a mark."""


class StreamCopies(Copies):
    """Copies of a GPU: each way on a stream of its own, the marks are events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.there, self.back = torch.Stream(device=device), torch.Stream(device=device)

    def begin(self) -> None:
        now = torch.accelerator.current_stream(self.device)
        self.there.wait_stream(now)
        self.back.wait_stream(now)

    def end(self) -> None:
        now = torch.accelerator.current_stream(self.device)
        now.wait_stream(self.there)
        now.wait_stream(self.back)

    def read(self, host: Staged, device: Staged, after: Any) -> Any:
        with _on(self.there):
            if after is not None:
                self.there.wait_event(after)
            for target, source in zip(host, device):
                target.copy_(source, non_blocking=True)
        return self.there.record_event()

    def write(self, host: Staged, device: Staged) -> Any:
        with _on(self.back):
            device.parameter.copy_(host.parameter, non_blocking=True)
        return self.back.record_event()

    def wait(self, mark: Any) -> None:
        mark.synchronize()


def _on(stream: torch.Stream) -> AbstractContextManager[Any]:
    return stream


class Staging:
    """The buffers and the copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type != "cpu"
        self.copies = StreamCopies(device) if self.pinned else Copies()
        self.buffers: list[torch.Tensor] = []

    def run(self, items: Sequence[Staged], step: Callable[[int, Staged], None]) -> None:
        """Bring each to the host, call `step` with its number and what is there, write the
        parameter back. Where a step raises, the parameters before it are written."""
        self._make_room(max(map(_room, items), default=0))
        copies, written = self.copies, [None] * _BUFFERS
        copies.begin()
        reading = self._reads(items, written)
        try:
            ahead = next(reading, None)
            for number, item in enumerate(items):
                assert ahead is not None
                (host, there), ahead = ahead, next(reading, None)
                copies.wait(there)
                step(number, host)
                written[number % _BUFFERS] = copies.write(host, item)
        finally:
            copies.end()

    def _reads(self, items: Sequence[Staged], written: list[Any]) -> Iterator[tuple[Staged, Any]]:
        for number, item in enumerate(items):
            which = number % _BUFFERS
            host = _views(self.buffers[which], item)
            yield host, self.copies.read(host, item, written[which])

    def _make_room(self, nbytes: int) -> None:
        if not self.buffers or self.buffers[0].numel() < nbytes:
            self.buffers = [
                torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)
                for _ in range(_BUFFERS)
            ]


def _views(buffer: torch.Tensor, item: Staged) -> Staged:
    found, start = [], 0
    for each in item:
        nbytes = each.numel() * each.element_size()
        found.append(buffer[start : start + nbytes].view(each.dtype).view(each.shape))
        start += _aligned(nbytes)
    return Staged(*found)


def _room(item: Staged) -> int:
    return sum(_aligned(each.numel() * each.element_size()) for each in item)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
