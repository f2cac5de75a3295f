"""Measure the machine that this process runs on, and describe it in a cluster file.

Collectives by size between the ranks of a group, and the link that explains them best.

The rates of one device: matrix products by dtype and size, and its memory.

A product counts 2 M N K operations; the rate of a dtype is the best of its sizes, as the roofline's
other bound, memory, accounts for the small ones. The bandwidth is that of `a + b` into a third
tensor: two reads and a write, as most operators between products have them.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from autoshard.errors import ConfigError
from autoshard.planning.cost import COLLECTIVES, Cluster, cluster_of, ring_bytes
from autoshard.runtime.agreement import from_first, gather, world_axis
from autoshard.runtime.files import write_whole
from autoshard.runtime.mesh import start_world

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


@dataclass(frozen=True)
class Effort:
    """How much is measured: (rows, inner, columns) of products, bytes of a tensor of the memory's
    sum, logical bytes of collectives, and seconds for each measurement."""

    products: tuple[tuple[int, int, int], ...]
    memory: int
    collectives: tuple[int, ...]
    budget: float


EFFORTS = {
    "cuda": Effort(
        ((1024, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192)),
        2**30,
        tuple(2**power for power in range(12, 29, 2)),
        0.4,
    ),
    "cpu": Effort(
        ((256, 512, 512), (512, 1024, 1024), (1024, 1024, 2048)),
        2**26,
        tuple(2**power for power in range(12, 25, 2)),
        0.4,
    ),
}
"""What a minute allows on each kind of device."""


@dataclass(frozen=True)
class Measured:
    """What was measured, on the ranks that measured.

    base: the machine as its data sheet describes it; its memory's size and ranks a node are used.
    samples, fits: collectives, and the link fitted to them, by "inside" and "between"; without
    those of a kind that this world has no ranks for.
    """

    name: str
    base: Cluster
    products: tuple[Product, ...]
    memory: float
    samples: dict[str, tuple[Sample, ...]]
    fits: dict[str, Fit]

    def rate(self, kind: str) -> float:
        """Operations a second of the fastest product of a kind; "float8" counts as half."""
        kind = "half" if kind == "float8" else kind
        return max(each.rate for each in self.products if each.kind == kind)

    def description(self) -> dict[str, Any]:
        """The body of a cluster file. Rates are what a program gets, so that no efficiency is left
        to be assumed; a link that was not measured is the data sheet's, as is the host's memory."""
        sheet, share, links = self.base.device, self.base.efficiency, {}
        known = {"inside": self.base.inside, "between": self.base.between, "host": sheet.host}
        for kind, link in known.items():
            if one := self.fits.get(kind) or (link and self.base.real(link)):
                links[kind] = {
                    "microseconds": _digits(1e6 * one.latency),
                    "gigabytes_per_second": _digits(one.bandwidth / 1e9),
                }
        if sheet.host is not None:
            rate = share.memory * sheet.host_memory_bandwidth
            links["host"]["memory_gigabytes_per_second"] = _digits(rate / 1e9)
        kinds = ("float8", "half", "float32", "float64")
        return {
            "name": self.name,
            "kind": sheet.kind,
            "devices_per_node": self.base.per_node,
            "memory": {
                "gigabytes": _digits(sheet.memory_bytes / 1e9),
                "gigabytes_per_second": _digits(self.memory / 1e9),
            },
            "tera_flops": {kind: _digits(self.rate(kind) / 1e12) for kind in kinds},
            **links,
            "efficiency": {
                "compute": 1,
                "memory": 1,
                "links": 1,
                "fits": share.fits,
                "attention": share.attention,
                "float8": 1,
                "overlap": share.overlap,
                "narrow": share.narrow,
            },
        }

    def save(self, path: Path) -> None:
        """Write the cluster file."""
        write_whole(path, json.dumps(self.description(), indent=1) + "\n", "cluster file")


def measure_machine(
    device: str,
    effort: Effort | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Measured:
    """Measure this process's device, and the links between the ranks that torchrun started.

    All ranks call it, at the same time: devices of one node share its power and its memory, as they
    do in a training step. The slowest rank's rates count, and every rank returns the same.
    device: "cpu" or the kind of accelerator. progress: called with (what, number, of how many).
    Raises ConfigError where there is none of it.
    """
    if device != "cpu" and not torch.get_device_module(device).is_available():
        raise ConfigError(f"there is no {device} device to measure", remedy="Give --device cpu.")
    world = start_world(device)
    base = cluster_of(device)
    effort = effort or EFFORTS.get(device, EFFORTS["cuda"])
    groups = _groups(world, base.per_node)
    total = 3 * len(effort.products) + 1 + 4 * len(effort.collectives) * len(groups)
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done, total)

    products = []
    for each in product_rates(device, list(effort.products), effort.budget):
        products.append(each)
        tell(f"{each.kind} product")
    memory = memory_rate(device, effort.memory, effort.budget)
    tell("memory")
    samples: dict[str, tuple[Sample, ...]] = {}
    for kind, group in groups.items():
        found = []
        for one in collective_times(group, effort.collectives, device, effort.budget):
            found.append(one)
            tell(f"{one.op} {kind} the node" if kind == "inside" else f"{one.op} between nodes")
        samples[kind] = tuple(found)
    everyone = world_axis()
    slowest = [
        min(rates)
        for rates in zip(*gather([memory, *(p.rate for p in products)], "measured rates", everyone))
    ]
    times = from_first(
        {kind: [one.seconds for one in found] for kind, found in samples.items()},
        "measured collectives",
        everyone,
    )
    samples = {
        kind: tuple(one._replace(seconds=t) for one, t in zip(found, times[kind]))
        for kind, found in samples.items()
    }
    return Measured(
        _name(device),
        base,
        tuple(p._replace(rate=rate) for p, rate in zip(products, slowest[1:])),
        slowest[0],
        samples,
        {kind: fitted(found) for kind, found in samples.items()},
    )


def _groups(world: int, per_node: int) -> dict[str, dist.ProcessGroup]:
    """This rank's neighbours in its node, and its likes of other nodes, where it has some. All
    ranks make all groups, in one order, as torch asks."""
    if world == 1:
        return {}
    rank = dist.get_rank()
    found = {}
    inside = [list(range(at, min(at + per_node, world))) for at in range(0, world, per_node)]
    between = [list(range(at, world, per_node)) for at in range(min(per_node, world))]
    for kind, parts in (("inside", inside), ("between", between)):
        for part in parts:
            if len(part) > 1 and len(part) < world:
                group = dist.new_group(part)
                if rank in part:
                    found[kind] = group
            elif len(part) == world:
                found[kind] = dist.group.WORLD
    return found


def _name(device: str) -> str:
    if device == "cpu":
        return "this-cpu"
    return torch.get_device_module(device).get_device_name().lower().replace(" ", "-")  # type: ignore[no-any-return]


def _digits(number: float) -> float:
    return float(f"{number:.4g}")
