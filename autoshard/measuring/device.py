"""The rates of one device: matrix products by dtype and size, and its memory.

A product counts 2 M N K operations; the rate of a dtype is the best of its sizes, as the roofline's
other bound, memory, accounts for the small ones. The bandwidth is that of `a + b` into a third
tensor: two reads and a write, as most operators between products have them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

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


DTYPES = {"half": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
"""The dtype that stands for each class of `planning.cost.dtype_class`. Scaled products of float8
are another operator, with recipes of their own: float8 counts as half where it is not known."""


class Product(NamedTuple):
    """One measured product of [rows, inner] and [inner, columns]: operations a second."""

    kind: str
    rows: int
    inner: int
    columns: int
    rate: float


def product_rates(
    device: str, sizes: list[tuple[int, int, int]], budget: float
) -> Iterator[Product]:
    """The rate of each dtype at each size (rows, inner, columns); `budget` seconds for each."""
    for kind, dtype in DTYPES.items():
        for rows, inner, columns in sizes:
            left = torch.randn(rows, inner, device=device).to(dtype)
            right = torch.randn(inner, columns, device=device).to(dtype)
            out = torch.empty(rows, columns, device=device, dtype=dtype)
            took = seconds_of(lambda: torch.mm(left, right, out=out), device, budget)  # noqa: B023
            yield Product(kind, rows, inner, columns, 2 * rows * inner * columns / took)


def memory_rate(device: str, nbytes: int, budget: float) -> float:
    """Bytes a second, read plus written, of a sum of two tensors of `nbytes` bytes."""
    left, right, out = (torch.ones(nbytes // 4, device=device) for _ in range(3))
    add: Callable[[], object] = lambda: torch.add(left, right, out=out)  # noqa: E731
    return 3 * nbytes / seconds_of(add, device, budget)
