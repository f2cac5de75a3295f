"""The copies of a step on the host: which waits for which, on a CPU and on the streams of a GPU."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from autoshard.runtime import host_memory
from autoshard.runtime.host_memory import Copies, Staged, Staging


def given(count: int = 7) -> list[Staged]:
    """Parameters and gradients of several sizes and dtypes, more than there are buffers."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    return [
        Staged(torch.full((i, 2), float(i), dtype=dtypes[i % 3]), torch.full((i, 2), 2.0))
        for i in range(count)
    ]


def add(number: int, host: Staged) -> None:
    host.parameter.add_(host.gradient)


def check(items: list[Staged]) -> None:
    for i, item in enumerate(items):
        assert item.parameter.tolist() == [[i + 2.0] * 2] * i


@pytest.mark.parametrize("late", ["reads", "writes"])
def test_copies_that_are_made_as_late_as_their_marks_allow(
    monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    class Late(Copies):
        """Each copy is made when somebody waits for it, or at the end."""

        def __init__(self) -> None:
            self.waiting: list[Any] = []

        def later(self, copies: Any, put_off: bool) -> Any:
            done: list[None] = []
            run = lambda: done or (copies(), done.append(None))  # noqa: E731
            (self.waiting.append if put_off else lambda one: one())(run)
            return run

        def read(self, host: Staged, device: Staged, after: Any) -> Any:
            def copies() -> None:
                if after is not None:
                    after()
                Copies.read(self, host, device, None)

            return self.later(copies, late == "reads")

        def write(self, host: Staged, device: Staged) -> Any:
            return self.later(lambda: Copies.write(self, host, device), late == "writes")

        def wait(self, mark: Any) -> None:
            mark()

        def end(self) -> None:
            for run in self.waiting:
                run()
            self.waiting = []

    monkeypatch.setattr(host_memory, "Copies", Late)
    items = given()
    Staging(torch.device("cpu")).run(items, add)
    check(items)


def test_the_streams_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            said.append(f"host waits for {self.name}")

    class Stream:
        names = iter(["there", "back"])

        def __init__(self, device: Any = None, name: str = "") -> None:
            self.name, self.count = name or next(self.names), 0

        def wait_stream(self, other: Any) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Any) -> None:
            said.append(f"{self.name} waits for {event.name}")

        def record_event(self) -> Event:
            self.count += 1
            return Event(f"{self.name} {self.count}")

    @contextlib.contextmanager
    def on(stream: Any) -> Any:
        said.append(f"copy on {stream.name}")
        yield

    empty = torch.empty
    pinned = []

    def unpinned(*sizes: int, pin_memory: bool, **settings: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*sizes, **settings)

    monkeypatch.setattr(torch, "Stream", Stream)
    now = Stream(name="now")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: now)
    monkeypatch.setattr(host_memory, "_on", on)
    monkeypatch.setattr(torch, "empty", unpinned)
    items = given(4)
    Staging(torch.device("cuda")).run(items, add)
    check(items)
    assert pinned == [True] * 3
    assert said == [
        *("there waits for now", "back waits for now", "copy on there"),
        *("copy on there", "host waits for there 1", "copy on back"),
        *("copy on there", "host waits for there 2", "copy on back"),
        *("copy on there", "there waits for back 1", "host waits for there 3", "copy on back"),
        *("host waits for there 4", "copy on back"),
        *("now waits for there", "now waits for back"),
    ]


def test_a_value_that_comes_from_the_host_is_waited_for() -> None:
    """What the copy moves is another device's; on one device there is nothing to wait for."""
    here, there = torch.ones(2), torch.ones(2, device="meta")
    for moved, waited in ((there, [there]), (here, [])):
        transfers = mock.Mock()
        with mock.patch.object(host_memory.compat, "transfers", lambda made=transfers: made):
            assert host_memory._wait(moved, here) is moved
        assert [call.args[0] for call in transfers.wait_tensor.call_args_list] == waited
