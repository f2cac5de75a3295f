"""Collectives by size between the ranks of a group, and the link that explains them best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from autoshard.measuring.device import seconds_of
from autoshard.planning.cost import COLLECTIVES, ring_bytes

_ITERATIONS = 30


class Sample(NamedTuple):
    """One measured collective: `nbytes` is its logical size (planning/cost/model.py)."""

    op: str
    nbytes: int
    ranks: int
    seconds: float


class Fit(NamedTuple):
    """A link, and how far it is from the samples: the median and the largest relative error."""

    latency: float
    bandwidth: float
    median_error: float
    largest_error: float


def collective_times(
    group: dist.ProcessGroup, sizes: Sequence[int], device: str, budget: float
) -> Iterator[Sample]:
    """Every collective of the cost model at logical sizes of about `sizes` bytes (each rank has at
    least one element); all ranks of the group call it. `budget` seconds for each."""
    n = dist.get_world_size(group)

    def together(runs: int) -> int:
        count = torch.tensor([runs], device=device)
        dist.all_reduce(count, dist.ReduceOp.MIN, group=group)
        return int(count)

    for op in COLLECTIVES:
        for size in sizes:
            run, nbytes = _collective(op, max(1, size // 4 // n), n, group, device)
            yield Sample(op, nbytes, n, seconds_of(run, device, budget, together))


def fitted(samples: Sequence[Sample]) -> Fit:
    """The latency and bandwidth of the alpha-beta model whose relative errors have the least sum.

    Absolute errors, by iteratively reweighted least squares (P. Holland, R. Welsch, "Robust
    regression using iteratively reweighted least-squares", Communications in Statistics 6(9),
    1977): one collective that another process disturbed does not move the line. ValueError
    where a sample took no time.
    """
    took = np.array([each.seconds for each in samples])
    if not len(took) or not (took > 0).all():
        raise ValueError("a collective took no time")
    steps = np.array([ring_bytes(each.op, each.ranks, each.ranks) for each in samples])
    sent = np.array([ring_bytes(each.op, each.nbytes, each.ranks) for each in samples])
    # columns of like size keep the problem well conditioned
    rows = np.stack([steps / steps.max(), sent / sent.max()], axis=1) / took[:, None]
    weights = np.ones(len(took))
    for _ in range(_ITERATIONS):
        found = _least_squares(rows * weights[:, None], weights)
        errors = np.abs(rows @ found - 1)
        weights = 1 / np.sqrt(np.maximum(errors, 1e-4))
    latency, slowness = found / [steps.max(), sent.max()]
    return Fit(float(latency), float(1 / slowness), float(np.median(errors)), float(errors.max()))


def _least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Two coefficients, the first from 0 and the second above it."""
    found: np.ndarray = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    for negative, other in ((0, 1), (1, 0)):
        if found[negative] < 0:
            alone = rows[:, other]
            found = np.zeros(2)
            found[other] = (alone @ wanted) / (alone @ alone)
    return np.maximum(found, [0, 1e-9 * found.max()])


def _collective(
    op: str, shard: int, n: int, group: dist.ProcessGroup, device: str
) -> tuple[Callable[[], object], int]:
    """A run of a collective whose shards have `shard` float32 elements, and its logical size."""
    part = torch.zeros(shard, device=device)
    whole = torch.zeros(shard * n, device=device)
    other = torch.zeros(shard * n, device=device)
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return runs[op], 4 * shard * n
