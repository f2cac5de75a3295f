"""Seconds of one run of a function on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 5
"""Timed rounds of a measurement; their median is its result."""


def seconds_of(
    run: Callable[[], object], device: str, budget: float, together: Callable[[int], int] = int
) -> float:
    """Median seconds of one `run`, over rounds that take about `budget` seconds in all.

    The runs of a round are enqueued one after the other, and the device is waited for once: what
    is measured is the rate of a program that never waits. together: makes of this rank's number of
    runs a round one that all ranks use, because each run of a collective needs all of them.
    """
    run()  # what is made once: workspaces, communicators, the choice of a kernel
    once = _timed(run, device, 1)
    runs = together(max(1, int(budget / ROUNDS / max(once, 1e-7))))
    return statistics.median(_timed(run, device, runs) for _ in range(ROUNDS)) / runs


def _timed(run: Callable[[], object], device: str, runs: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(runs):
        run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
