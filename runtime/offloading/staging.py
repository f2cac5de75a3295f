"""Parameters and gradients on their way through the host's memory, a few at a time.

    to the host      read 0   read 1   read 2   ...
    the host                  step 0   step 1   step 2   ...
    to the device                      write 0  write 1  write 2

Each parameter passes through one of three buffers, so that while the host computes with one, the
next is read and the one before is written back. On a GPU the two ways have a stream each, and the
buffers are pinned; on a CPU the copies are plain, and the order is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

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
